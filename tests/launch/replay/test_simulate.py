"""Results of simulations small enough to be checked by hand."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.conftest import Triptych
from tests.workers.execute.clients import crowd
from tests.workers.execute.factories import make_beams, make_engine, make_sequence, run
from triptych.launch.replay.costs import RecordedSteps
from triptych.launch.replay.options import EngineConfig
from triptych.launch.replay.recorded_arrivals import arrivals_of_trace
from triptych.launch.replay.router import make_router
from triptych.launch.replay.settings import make_scheduler
from triptych.launch.replay.simulate import simulate
from triptych.launch.replay.workload import (
    Arrival,
    Synthetic,
    arrivals_of_file,
    draw_arrivals,
    parse_lengths,
)
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.scheduling.cost import Prices, Work

STEP = Prices(step=10.0, prefill_token=0.0, decode=0.0, read=0.0)


def arrivals(count: int, *, every_s: float = 0.0, **options: Any) -> list[Arrival]:
    own = {"num_prompt_tokens": 20, "num_output_tokens": 3, **options}
    return [Arrival(at_s=index * every_s, **own) for index in range(count)]


def figures(
    requests: list[Arrival], *, prices: Prices = STEP, replicas: int = 1, router: str = "round_robin", **options: Any
) -> dict[str, Any]:
    config = EngineConfig.from_options(**{"num_pages": 1000, "prefill_chunk": 64, **options})
    return simulate(
        requests,
        lambda: make_scheduler(config, 4096),
        prices,
        router=make_router(router, config.cache.page_tokens),
        num_replicas=replicas,
    )


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_later_token() -> None:
    report = figures(arrivals(1))
    assert (report["steps"], report["finished"], report["duration_s"]) == (3, 1, 0.03)
    assert report["ttft_ms"] == {"p50": 10.0, "p90": 10.0, "p99": 10.0, "max": 10.0}
    assert report["inter_token_ms"]["max"] == 10.0
    assert report["latency_ms"]["p50"] == 30.0
    assert report["output_tokens_per_second"] == 100.0


def test_every_figure_of_two_requests_with_a_common_prefix() -> None:
    """The second one finds the only full page of the first."""
    first, second = arrivals(2, every_s=1.0, prefix=1, num_prefix_tokens=20)
    report = figures([first, second])
    times = {name: report.pop(name) for name in ("ttft_ms", "inter_token_ms", "latency_ms", "wait_ms")}
    assert [{*row.values()} for row in times.values()] == [{10.0}, {10.0}, {30.0}, {0.0}]
    assert report == {
        "requests": 2, "finished": 2, "expired": 0, "refused": 0, "duration_s": 1.03,
        "requests_per_second": 1.942, "output_tokens_per_second": 5.8, "prompt_tokens_per_second": 38.8,
        "steps": 6, "tokens_per_step": 4.67, "decodes_per_step": 0.67, "busy": {"replica 0": 0.0583},
        "requests_of": {"replica 0": 2}, "cache_hit_rate": 0.4, "cached_tokens": 16,
        "preemptions": 0, "swaps": 0, "pages_held_most": 2,
    }  # fmt: skip


def test_urgent_request_gets_the_next_credit() -> None:
    running, waiting = arrivals(2, num_output_tokens=20), arrivals(1, num_output_tokens=20)
    [urgent] = arrivals(1, priority=-1, max_queue_ms=250.0)
    report = figures([*running, *waiting, urgent], policy="priority", max_num_seqs=1)
    assert (report["finished"], report["expired"]) == (4, 0)


def test_prompt_tokens_decodes_and_reads_have_a_price() -> None:
    report = figures(arrivals(1), prices=Prices(step=1.0, prefill_token=0.5, decode=2.0, read=0.01))
    assert report["ttft_ms"]["max"] == 1.0 + 0.5 * 20 + 0.01 * 20
    assert report["inter_token_ms"]["max"] == round(1.0 + 2.0 + 0.01 * 22, 3)


def test_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    first, second = Arrival(at_s=0.0, num_prompt_tokens=5, num_output_tokens=9), arrivals(2, every_s=0.013)[1]
    assert figures([first, second])["wait_ms"]["max"] == 7.0


def test_time_before_the_first_arrival_does_not_count() -> None:
    [late] = arrivals(2, every_s=5.0)[1:]
    assert figures([late])["duration_s"] == 0.03


def test_no_step_runs_without_requests() -> None:
    report = figures(arrivals(2, every_s=10.0))
    assert (report["duration_s"], report["wait_ms"]["max"]) == (10.03, 0.0)
    assert report["busy"] == {"replica 0": round(0.06 / 10.03, 4)}


def test_requests_beyond_the_batch_wait() -> None:
    assert figures(arrivals(4), max_num_seqs=4)["steps"] == 4  # 80 prompt tokens in chunks of 64, and 4 rows
    assert figures(arrivals(4), max_num_seqs=1)["steps"] > 8


def test_prompt_that_can_never_fit_is_refused_and_the_others_are_served() -> None:
    report = figures([*arrivals(1, num_prompt_tokens=4096), *arrivals(3)])
    assert (report["refused"], report["finished"]) == (1, 3)


def test_deadline_ends_a_request() -> None:
    report = figures([*arrivals(1, num_output_tokens=100, deadline_ms=45.0), *arrivals(1)])
    assert (report["expired"], report["finished"]) == (1, 1)


def test_request_that_waits_too_long_is_never_started() -> None:
    report = figures(arrivals(6, num_output_tokens=30, max_queue_ms=100.0), max_num_seqs=1, num_pages=8)
    assert report["expired"] > 0
    assert report["finished"] + report["expired"] == 6


def test_scarce_memory_causes_preemptions() -> None:
    report = figures(arrivals(4, num_output_tokens=60), num_pages=12, safety_margin=0.0, prefix_cache=False)
    assert report["preemptions"] > 0
    assert (report["finished"], report["pages_held_most"]) == (4, 12)


def test_twice_the_replicas_serve_twice_as_much() -> None:
    requests = arrivals(200, num_output_tokens=40)
    one, two = (figures(requests, max_num_seqs=4, replicas=n)["duration_s"] for n in (1, 2))
    assert 1.9 < one / two < 2.1


def test_least_loaded_replica_gets_the_next_request() -> None:
    spec = Synthetic(
        num_requests=400, rate=16.0, prompt_tokens=parse_lengths("p", "20"), output_tokens=parse_lengths("o", "exp:40")
    )  # fmt: skip
    names = ("round_robin", "least_queue")
    by_turns, by_queue = (figures(draw_arrivals(spec), replicas=4, router=name, max_num_seqs=2) for name in names)
    assert set(by_turns["requests_of"].values()) == {100}
    assert by_queue["ttft_ms"]["p90"] < 0.7 * by_turns["ttft_ms"]["p90"]


def as_map(arrival: Arrival) -> dict[str, Any]:
    return {name: getattr(arrival, name) for name in arrival.__dataclass_fields__}


def test_prefix_router_finds_more_prefixes() -> None:
    spec = Synthetic(
        num_requests=300, rate=20.0, prompt_tokens=parse_lengths("p", "10-40"), output_tokens=parse_lengths("o", "8"),
        num_prefixes=12, num_prefix_tokens=160,
    )  # fmt: skip
    options: dict[str, Any] = {"replicas": 4, "num_pages": 60, "page_size": 8, "safety_margin": 0.0}
    rates = {name: figures(draw_arrivals(spec), router=name, **options)["cache_hit_rate"] for name in ROUTERS}
    assert rates["prefix_affinity"] > 1.2 * rates["round_robin"] > 0


ROUTERS = ("round_robin", "prefix_affinity")


@pytest.mark.parametrize(
    ("prompt", "salt", "loads", "chosen"),
    [
        (range(4), "", [3, 1], 0),
        (range(6), "", [3, 1], 0),
        (range(6), "", [4, 1], 1),
        (range(3), "", [3, 1], 1),
        (range(4), "x", [3, 1], 1),
        ((9, *range(1, 8)), "", [3, 1], 1),
        ((0, 1, 2, 3, 9, 9, 9, 9), "", [3, 1], 0),
    ],
    ids=["a page", "more", "far more load", "less than a page", "other salt", "other first page", "other second page"],
)
def test_request_goes_to_the_replica_with_its_prefix(
    prompt: Iterable[int], salt: str, loads: list[int], chosen: int
) -> None:
    router = make_router("prefix_affinity", 4)
    assert router.choose(np.arange(8, dtype=np.int32), "", [0, 0]) == 0
    assert router.choose(np.array([*prompt], np.int32), salt, loads) == chosen


def test_salt_separates_prefixes() -> None:
    same = arrivals(1, prefix=1, num_prefix_tokens=20, num_output_tokens=1) * 2
    other = [same[0], Arrival(**{**as_map(same[0]), "cache_salt": "x"})]
    spaced = [[Arrival(**{**as_map(a), "at_s": float(i)}) for i, a in enumerate(pair)] for pair in (same, other)]
    assert [figures(pair)["cached_tokens"] > 0 for pair in spaced] == [True, False]


def test_same_seed_draws_the_same_requests() -> None:
    spec = Synthetic(
        num_requests=50, rate=5.0, prompt_tokens=parse_lengths("p", "lognormal:50:0.5"),
        output_tokens=parse_lengths("o", "exp:20"), seed=3,
    )  # fmt: skip
    drawn = draw_arrivals(spec)
    assert drawn == draw_arrivals(spec)
    assert all(a.num_prompt_tokens >= 1 and a.num_output_tokens >= 1 for a in drawn)
    assert [a.at_s for a in drawn] == sorted(a.at_s for a in drawn)


def test_lengths_have_the_distribution_that_was_asked_for() -> None:
    def drawn(text: str) -> list[int]:
        lengths, rng = parse_lengths("prompt_tokens", text), random.Random(0)
        return [lengths(rng) for _ in range(2000)]

    assert (set(drawn("20")), set(drawn("10-12"))) == ({20}, {10, 11, 12})
    assert statistics.fmean(drawn("exp:40")) == pytest.approx(40, rel=0.05)
    assert statistics.median(drawn("lognormal:50:0.5")) == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "9-3", "exp:x", "exp:0", "exp:nan", "lognormal:5", "uniform:1:2", "-4"])
def test_malformed_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="prompt_tokens is"):
        parse_lengths("prompt_tokens", text)


def test_prices_are_fitted_to_the_recorded_steps(tmp_path: Path) -> None:
    prices, path = Prices(step=3.0, prefill_token=0.02, decode=0.05, read=1e-4), tmp_path / "trace"
    now_ns, lines = 1000, ['{"trace": ""}']
    for index in range(60):
        decodes, chunk = list(range(index % 7)), 64 * (index % 3)
        work = Work(chunk, len(decodes), chunk + 11 * index * len(decodes) + 1)
        line = {"step": index, "planned_ns": now_ns, "reads": work.num_reads, "decodes": decodes, "waiting": 1}
        now_ns += round(prices.of(work) * 1e6)
        lines.append(json.dumps({**line, "prefills": [[9, 0, chunk]], "collected_ns": now_ns, "running": 1}))
        lines.append('{"release": 1}')
        now_ns += 500_000  # from step to step
    path.write_text("\n".join(lines))
    fitted = RecordedSteps.read(path).prices(path)
    assert fitted == pytest.approx((3.5, 0.02, 0.05, 1e-4), rel=1e-3)


def record(path: Path) -> dict[int, int]:
    """A trace of requests with a common prefix, and the output tokens of each."""
    lengths = {index: 4 + index for index in range(6)}
    with path.open("w") as file:
        engine = make_engine(trace_file=file, num_pages=64, prefix_cache=True, max_num_seqs=8)
        for index, max_tokens in lengths.items():
            sequence = make_sequence(index, num_tokens=20 + index, max_tokens=max_tokens, speaker=index % 2)
            sequence.accepted_at = (7 + index) * 10**9
            engine.add(sequence)
        run(engine)
    return lengths


def test_recorded_requests_keep_their_times_lengths_and_prefixes(tmp_path: Path) -> None:
    lengths = record(tmp_path / "trace")
    recorded = arrivals_of_trace(tmp_path / "trace")
    assert [a.at_s for a in recorded] == [0, 1, 2, 3, 4, 5]
    assert sorted(a.num_output_tokens for a in recorded) == sorted(lengths.values())
    by_length = {a.num_prompt_tokens: a.tokens for a in recorded}
    alike, other = by_length[20], by_length[21]
    assert alike is not None and other is not None and by_length[22] is not None  # noqa: PT018
    assert (alike[:20] == by_length[22][:20]).all()
    assert not (alike[:20] == other[:20]).any()


@pytest.mark.parametrize("host_pages", [0, 40], ids=["began again", "swapped"])
def test_each_beam_of_a_recorded_search_has_as_many_tokens_as_the_search_took(host_pages: int, tmp_path: Path) -> None:
    beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
    with (tmp_path / "trace").open("w") as file:
        crowd(beams, host_pages=host_pages, trace_file=file).close()
    recorded = arrivals_of_trace(tmp_path / "trace")
    assert sorted((a.num_prompt_tokens, a.num_output_tokens) for a in recorded) == [(9, 20)] * 3 + [(9, 30)] * 2
    assert figures(recorded)["finished"] == 5


def test_listed_requests_come_by_their_times_with_all_their_fields(tmp_path: Path) -> None:
    later = {"t_s": 2, "prompt_tokens": 9, "output_tokens": 4, "prefix": "b", "prefix_tokens": 5, "cache_salt": "x"}
    first = {"t_s": 0.5, "prompt_tokens": 7, "output_tokens": 3, "priority": 2, "deadline_ms": 80, "max_queue_ms": 40}
    (tmp_path / "arrivals").write_text("\n".join(map(json.dumps, (later, first))))
    own: list[dict[str, Any]] = [
        {"at_s": 0.5, "num_prompt_tokens": 7, "num_output_tokens": 3, "prefix": 1, "priority": 2},
        {"at_s": 2.0, "num_prompt_tokens": 9, "num_output_tokens": 4, "num_prefix_tokens": 5, "cache_salt": "x"},
    ]
    own[0] |= {"deadline_ms": 80, "max_queue_ms": 40}
    assert arrivals_of_file(tmp_path / "arrivals") == [Arrival(**fields) for fields in own]


BAD_LINES = {
    '{"t_s": 0, "prompt_tokens": 5}': "line 1: it has no 'output_tokens'",
    '{"t_s": 0, "prompt_tokens": 0, "output_tokens": 1}': "prompt_tokens is 0, the least is 1",
    '{"t_s": -1, "prompt_tokens": 1, "output_tokens": 1}': "t_s is -1, the least is 0",
    '{"t_s": "0", "prompt_tokens": 1, "output_tokens": 1}': "t_s is '0'",
    '{"t_s": 0, "prompt_tokens": 1, "output_tokens": 1, "x": 1}': "unknown field 'x'",
    '{"t_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 3}': "prefix and prefix_tokens go together",
    '{"t_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix": 1, "prefix_tokens": 6}': "the limit is .* 5",
    "": "has no requests",
    "[1]": "line 1: not a JSON object",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "arrivals").write_text(line + "\n")
    with pytest.raises(ConfigError, match=BAD_LINES[line]):
        arrivals_of_file(tmp_path / "arrivals")


BAD_CALLS = {
    (): "nothing to simulate",
    ("--verify",): "nothing to verify",
    ("--requests", "5"): "the cost of a step is unknown",
    ("--requests", "5", "--step-ms", "1", "--router", "random"): "router is 'random', known are: round_robin",
    ("--requests", "0", "--step-ms", "1"): "requests is 0, the least is 1",
    ("--requests", "5", "--decode-us", "1"): "the other costs need step_ms",
    ("--requests", "5", "--read-ns", "1"): "the other costs need step_ms",
    ("--requests", "5", "--step-ms", "1", "--page-size", "3"): "page_size is 3, it must be a power of two",
    ("/nowhere", "--step-ms", "1"): "cannot read /nowhere: No such file or directory\n",
}


@pytest.mark.parametrize("arguments", BAD_CALLS)
def test_impossible_options_are_refused_with_the_reason(arguments: tuple[str, ...], triptych: Triptych) -> None:
    code, out, err = triptych("replay", *arguments)
    assert (code, out) == (2, "")
    assert BAD_CALLS[arguments] in err


ONE_REQUEST = ("--requests", "1", "--prompt-tokens", "20", "--output-tokens", "3", "--json")


def test_prices_are_given_in_the_units_of_their_flags(triptych: Triptych) -> None:
    prices = ("--step-ms", "1", "--prefill-token-us", "500", "--decode-us", "2000", "--read-ns", "10000")
    report = json.loads(triptych("replay", *ONE_REQUEST, *prices).out)
    assert report["ttft_ms"]["max"] == 1.0 + 0.5 * 20 + 0.01 * 20
    assert report["inter_token_ms"]["max"] == round(1.0 + 2.0 + 0.01 * 22, 3)


def test_prices_may_come_from_the_trace_of_other_requests(triptych: Triptych, tmp_path: Path) -> None:
    clock = itertools.count(0, 5_000_000)
    with (tmp_path / "trace").open("w") as file:
        options: dict[str, Any] = {"prefill_chunk": 64, "trace_file": file, "clock": lambda: next(clock)}
        run(make_engine(make_sequence(num_tokens=40, max_tokens=20), **options))
    report = json.loads(triptych("replay", *ONE_REQUEST, "--cost-from", tmp_path / "trace").out)
    assert (report["requests"], report["page_size"]) == (1, 4)
    prices = RecordedSteps.read(tmp_path / "trace").prices(tmp_path / "trace")
    assert report["ttft_ms"]["max"] == pytest.approx(prices.of(Work(20, 0, 20)), abs=1e-3)


def test_flags_default_to_the_settings_of_the_trace(triptych: Triptych, tmp_path: Path) -> None:
    record(tmp_path / "trace")
    outcome = triptych("replay", tmp_path / "trace", "--json", "--step-ms", "1", "--policy", "priority")
    report = json.loads(outcome.out)
    assert (report["page_size"], report["num_pages"], report["max_num_seqs"]) == (4, 64, 8)
    assert (report["policy"], report["finished"]) == ("priority", 6)


def test_speculation_is_refused_because_a_simulation_has_no_tokens() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 4, and here it must be 0"):
        make_scheduler(EngineConfig.from_options(num_speculative_tokens=4), 4096)
