"""``triptych replay``: the real scheduler without a model, on recorded, listed or random requests."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.errors import ConfigError
from ...workers.execute.scheduling.cost import Prices
from ..terminal.progress import count_bar
from .costs import RecordedSteps
from .options import EngineConfig, StudyOptions
from .recorded_arrivals import arrivals_of_trace
from .router import make_router
from .settings import DEFAULT_PAGES, Recorded, make_scheduler, merge
from .show import show_report, show_verdict
from .simulate import simulate
from .trace_file import is_trace
from .verify import verify
from .workload import Arrival, Synthetic, arrivals_of_file, draw_arrivals, faster, parse_lengths

if TYPE_CHECKING:
    from rich.console import Console


def verify_file(path: Path | None, *, as_json: bool) -> int:
    """Replay a recorded schedule step by step. The exit code is 0 if every plan equals the recorded one, else 1."""
    if path is None:
        raise ConfigError("nothing to verify: give a trace", param="file")
    verdict = verify(path)
    print(json.dumps({"exact": verdict.is_exact, **asdict(verdict)})) if as_json else show_verdict(path, verdict)
    return 0 if verdict.is_exact else 1


def replay(
    file: Path | None, options: StudyOptions, config: EngineConfig, *, given: Collection[str], as_json: bool,
    console: Console,
) -> int:  # fmt: skip
    """Print the figures of a simulation to standard output. Fields of ``config`` that were not ``given`` are taken from
    the trace, if there is one.

    Raises:
        ConfigError: there is nothing to simulate, or the cost of a step is unknown.
    """
    trace = file if file is not None and is_trace(file) else None
    arrivals = _arrivals(file, trace, options)
    longest = max(arrival.num_prompt_tokens + arrival.num_output_tokens for arrival in arrivals)
    max_model_len = options.max_model_len or longest + 1
    source = Path(options.cost_from) if options.cost_from is not None else trace
    if source is not None:
        recorded = Recorded.read(source)
        config = merge(recorded.options, config, given)
        max_model_len = options.max_model_len or recorded.max_model_len
    prices = _prices(options, source)
    with count_bar(console, "arrivals", len(arrivals)) as progress:
        report = simulate(
            arrivals,
            lambda: make_scheduler(config, max_model_len),
            prices,
            router=make_router(options.router, config.cache.page_tokens),
            num_replicas=options.replicas,
            progress=progress,
        )
    settings = _settings(options, config, prices)
    print(json.dumps({**settings, **report})) if as_json else show_report(settings, report)
    return 0


def _arrivals(file: Path | None, trace: Path | None, options: StudyOptions) -> list[Arrival]:
    if file is None:
        return _drawn(options)
    if options.requests is not None:
        raise ConfigError("give a file or requests, not both", param="requests")
    arrivals = arrivals_of_file(file) if trace is None else arrivals_of_trace(trace)
    return faster(arrivals, options.speed)


def _drawn(options: StudyOptions) -> list[Arrival]:
    if options.requests is None:
        raise ConfigError("nothing to simulate: give a trace, a file of arrivals, or --requests", param="file")
    return draw_arrivals(
        Synthetic(
            num_requests=options.requests,
            rate=options.rate,
            prompt_tokens=parse_lengths("prompt_tokens", options.prompt_tokens),
            output_tokens=parse_lengths("output_tokens", options.output_tokens),
            num_prefixes=options.prefixes,
            num_prefix_tokens=options.prefix_tokens,
            seed=options.seed,
        )
    )


def _prices(options: StudyOptions, source: Path | None) -> Prices:
    if options.step_ms is not None:
        return Prices(
            options.step_ms, options.prefill_token_us / 1e3, options.decode_us / 1e3, options.read_ns / 1e6
        )  # fmt: skip
    if source is None:
        raise ConfigError(
            "the cost of a step is unknown: give --step-ms, or a trace to fit it from (--cost-from)", param="step_ms"
        )
    return RecordedSteps.read(source).prices(source)


def _settings(options: StudyOptions, config: EngineConfig, prices: Prices) -> dict[str, Any]:
    cache, scheduler = config.cache, config.scheduler
    return {
        "replicas": options.replicas,
        "router": options.router,
        "policy": scheduler.policy,
        "max_num_seqs": scheduler.num_rows,
        "token_budget": scheduler.token_budget,
        "page_size": cache.page_tokens,
        "num_pages": cache.num_pages or DEFAULT_PAGES,
        "prefix_cache": cache.prefix_cache,
        "cost_ms": {name: float(f"{value:.6g}") for name, value in prices._asdict().items()},
    }
