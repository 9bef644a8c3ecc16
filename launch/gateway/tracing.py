"""OpenTelemetry spans out of the ledger: one for the request, one below it for each stage that took time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ...driver.stream import Completion
from ...protocol.errors import ConfigError
from ...protocol.messages import LEDGER_STAGES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

FLUSH_S = 1.0  # that a stop waits for who collects spans


class Tracer:
    """Traces nothing, for nothing."""

    def __call__(self, request: Request, completions: Sequence[Completion]) -> None:
        """Record that a request has ended."""

    def close(self) -> None:
        """Send what waits to be sent."""


def make_tracer(endpoint: str | None) -> Tracer:
    """A tracer that sends to an OTLP/HTTP endpoint; without one, none.

    Raises:
        ConfigError: the extra ``otel`` is not installed.
    """
    if endpoint is None:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs pip install 'triptych[otel]': {error}", param="otlp_traces_endpoint"
        ) from error
    return SpanTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class SpanTracer(Tracer):
    """A tracer whose spans go to ``processor``."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "triptych"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._source, self._propagator = self._provider.get_tracer("triptych"), TraceContextTextMapPropagator()

    def __call__(self, request: Request, completions: Sequence[Completion]) -> None:
        from opentelemetry import trace

        source, parent = self._source, self._propagator.extract(dict(request.headers))
        for completion in completions:
            # The ledger's times are durations: the request ended just now, and its stages follow each other.
            end_ns = time.time_ns()
            now_ns = end_ns - int(completion.ledger["wall_ms"] * 1e6)
            span = source.start_span("llm_request", parent, start_time=now_ns, attributes=_attributes(completion))
            below = trace.set_span_in_context(span)
            for stage in LEDGER_STAGES:
                duration_ns = int(completion.ledger["stages_ms"].get(stage, 0.0) * 1e6)
                if duration_ns:
                    source.start_span(stage, below, start_time=now_ns).end(now_ns + duration_ns)
                    now_ns += duration_ns
            span.end(end_ns)

    def close(self) -> None:
        # In a thread that is left to itself: nothing of OpenTelemetry's gives up before half a minute.
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(FLUSH_S)


def _attributes(completion: Completion) -> dict[str, Any]:
    usage, ledger = completion.usage, completion.ledger
    return {
        "gen_ai.response.id": completion.request_id,
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cached_tokens": usage["cached_tokens"],
        "gen_ai.latency.time_in_queue": sum(ledger["stages_ms"][s] for s in ("queue", "credit", "schedule")) / 1e3,
        "gen_ai.latency.time_in_model_prefill": ledger["stages_ms"]["prefill"] / 1e3,
        "gen_ai.latency.time_in_model_decode": ledger["stages_ms"]["decode"] / 1e3,
        "gen_ai.latency.e2e": ledger["wall_ms"] / 1e3,
        **({"gen_ai.latency.time_to_first_token": ledger["ttft_ms"] / 1e3} if ledger["ttft_ms"] else {}),
    }
