"""OpenTelemetry spans: one per request, however it ends, with a child for each stage of its ledger that took time.

Source of the attributes: OpenTelemetry's semantic conventions for generative AI; of the latencies, in seconds: vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ....driver.stream import Completion
from ....protocol.errors import ConfigError, TriptychError
from ....protocol.messages import LEDGER_STAGES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

# By path; of another route, the operation is the path's last part.
_OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}  # fmt: skip
FLUSH_S = 1.0  # how long a stop waits for the collector


class Tracer:
    """The default, which traces nothing."""

    def __call__(self, request: Request, completions: Sequence[Completion]) -> None:
        """Record the answers to a request."""

    def failed(self, request: Request, error: TriptychError | None, wall_s: float) -> None:
        """Record a request that has no answer after ``wall_s``: because of an error, or since its client has left."""

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
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({"service.name": "triptych"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=Resource.create().merge(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._source, self._propagator = self._provider.get_tracer("triptych"), TraceContextTextMapPropagator()

    def __call__(self, request: Request, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self._record(request, completion.ledger["wall_ms"], completion.ledger["stages_ms"], _attributes(completion))

    def failed(self, request: Request, error: TriptychError | None, wall_s: float) -> None:
        reason = "abort" if error is None else "error"
        attributes: dict[str, Any] = {"gen_ai.response.finish_reasons": [reason]}
        if hasattr(request.state, "request_id"):
            attributes["gen_ai.response.id"] = request.state.request_id
        wall_ms, stages_ms, partial = wall_s * 1e3, {}, error.partial if error is not None else None
        if partial is not None and partial.summary:
            wall_ms, stages_ms = partial.ledger["wall_ms"], partial.ledger["stages_ms"]
            attributes |= _attributes(partial)
        if error is not None:
            attributes["error.type"] = error.code
        self._record(request, wall_ms, stages_ms, attributes)

    def _record(
        self, request: Request, wall_ms: float, stages_ms: Mapping[str, float], attributes: Mapping[str, Any]
    ) -> None:
        """The request has ended just now, and its stages followed one another."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        source, parent = self._source, self._propagator.extract(dict(request.headers))
        end_ns = time.time_ns()
        now_ns = end_ns - int(wall_ms * 1e6)
        whole = {**_asked(request), **attributes}
        span = source.start_span("llm_request", parent, SpanKind.SERVER, whole, start_time=now_ns)
        below = set_span_in_context(span)
        for stage in LEDGER_STAGES:
            duration_ns = int(stages_ms.get(stage, 0.0) * 1e6)
            if duration_ns:
                source.start_span(stage, below, start_time=now_ns).end(now_ns + duration_ns)
                now_ns += duration_ns
        if "error.type" in attributes:
            span.set_status(StatusCode.ERROR)
        span.end(end_ns)

    def close(self) -> None:
        # In a thread that is not waited for any longer: OpenTelemetry's own timeouts are at least half a minute.
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(FLUSH_S)


def _asked(request: Request) -> dict[str, Any]:
    path = request.scope.get("path", "")
    attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(path, path.rpartition("/")[2]),
        "gen_ai.provider.name": "triptych",
    }
    if hasattr(request.state, "model"):  # not of an answer that is resumed
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = request.state.model
    return attributes


def _attributes(completion: Completion) -> dict[str, Any]:
    usage, ledger = completion.usage, completion.ledger
    written = {} if completion.embedding is not None else {
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }  # fmt: skip
    return {
        "gen_ai.response.id": completion.request_id,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        **written,
        "gen_ai.usage.cache_read.input_tokens": usage["cached_tokens"],
        "gen_ai.latency.time_in_queue": sum(ledger["stages_ms"][s] for s in ("queue", "credit", "schedule")) / 1e3,
        "gen_ai.latency.time_in_model_prefill": ledger["stages_ms"]["prefill"] / 1e3,
        "gen_ai.latency.time_in_model_decode": ledger["stages_ms"]["decode"] / 1e3,
        "gen_ai.latency.e2e": ledger["wall_ms"] / 1e3,
        **({"gen_ai.latency.time_to_first_token": ledger["ttft_ms"] / 1e3} if ledger["ttft_ms"] else {}),
    }
