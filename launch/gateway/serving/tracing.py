"""OpenTelemetry spans from the ledger: one for the request, with one child for each stage that took time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ....driver.stream import Completion
from ....protocol.errors import ConfigError
from ....protocol.messages import LEDGER_STAGES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

FLUSH_S = 1.0  # how long a stop waits for the collector


class Tracer:
    """The default, which traces nothing."""

    def __call__(self, request: Request, completions: Sequence[Completion]) -> None:
        """Record the end of a request."""

    def close(self) -> None:
        """Send the remaining spans."""


def make_tracer(endpoint: str | None) -> Tracer:
    """A tracer that sends to an OTLP/HTTP endpoint; without an endpoint, one that traces nothing.

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
    """A tracer that passes its spans to ``processor``."""

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
            # The ledger contains durations: the request ended just now, and its stages follow one another.
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
        # In a thread that is not waited for any longer: OpenTelemetry's own timeouts are at least half a minute.
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
