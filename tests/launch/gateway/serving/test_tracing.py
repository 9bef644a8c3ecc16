"""Spans made from the ledger."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode
from starlette.requests import Request

from tests.launch.gateway.conftest import Site, site
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway.serving.tracing import FLUSH_S, SpanTracer, Tracer, make_tracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def spans(pipeline: Driver) -> Iterator[tuple[Site, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    with site(pipeline.run_dir) as api:
        api.gateway.tracer = SpanTracer(SimpleSpanProcessor(exporter))
        yield api, exporter


def test_request_is_a_span_of_the_caller_s_trace(spans: tuple[Site, InMemorySpanExporter]) -> None:
    api, exporter = spans
    body = {"prompt": "hi", "max_tokens": 20}
    api.http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
    whole, found = the_request(exporter), exporter.get_finished_spans()
    assert whole.context is not None
    assert whole.parent is not None
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.output_tokens"] == 20
    assert whole.kind is SpanKind.SERVER, "what draws a map of services looks for"
    stages = [span for span in found if span.name != "llm_request"]
    assert {"prefill", "decode", "tokenize"} <= {span.name for span in stages}
    assert all(span.parent is not None and span.parent.span_id == whole.context.span_id for span in stages)
    assert sum(map(duration, stages)) == pytest.approx(duration(whole), rel=0.02)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, "chat"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1}, "text_completion"),
        ("/v1/embeddings", {"input": "hi"}, "embeddings"),
        ("/v1/completions", {**LONG, "deadline_ms": 1}, "text_completion"),
    ],
    ids=["chat", "completion", "embedding", "failure"],
)
def test_request_names_its_operation_and_its_model(
    spans: tuple[Site, InMemorySpanExporter], path: str, body: dict[str, Any], operation: str
) -> None:
    api, exporter = spans
    api.http.post(path, json=body)
    attributes = the_request(exporter).attributes
    assert attributes is not None
    [model] = api.gateway.model_names
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == model


def test_names_of_attributes_are_those_of_the_conventions(spans: tuple[Site, InMemorySpanExporter]) -> None:
    api, exporter = spans
    api.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    names = the_request(exporter).attributes or {}
    of_vllm = {name for name in names if name.startswith("gen_ai.latency.")}
    assert set(names) - of_vllm <= {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}


def test_embedding_has_no_tokens_that_came_out_and_no_reason_to_end(
    spans: tuple[Site, InMemorySpanExporter],
) -> None:
    """The conventions name neither for an embedding, and "length" would say that it was cut."""
    api, exporter = spans
    api.http.post("/v1/embeddings", json={"input": "hi"})
    attributes = the_request(exporter).attributes or {}
    assert attributes["gen_ai.usage.input_tokens"] == 2
    assert not {"gen_ai.response.finish_reasons", "gen_ai.usage.output_tokens"} & set(attributes)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_failed_request_is_a_span_with_its_error(slow: Driver, stream: bool) -> None:
    exporter = InMemorySpanExporter()
    with site(slow.run_dir) as api:
        api.gateway.tracer = SpanTracer(SimpleSpanProcessor(exporter))
        api.http.post("/v1/completions", json={**LONG, "deadline_ms": 300, "stream": stream})
        whole = the_request(exporter)
    assert whole.attributes is not None
    assert whole.attributes["error.type"] == "deadline_exceeded"
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert whole.status.status_code is StatusCode.ERROR
    assert {"tokenize", "decode"} <= {span.name for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_request_that_took_too_long_is_a_span_with_its_error(slow: Driver, stream: bool) -> None:
    exporter = InMemorySpanExporter()
    with site(slow.run_dir, request_timeout_s=0.3) as api:
        api.gateway.tracer = SpanTracer(SimpleSpanProcessor(exporter))
        api.http.post("/v1/completions", json={**LONG, "stream": stream})
        attributes = the_request(exporter).attributes
    assert attributes is not None
    assert attributes["error.type"] == "timeout"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_request_whose_client_leaves_is_a_span(spans: tuple[Site, InMemorySpanExporter], stream: bool) -> None:
    api, exporter = spans
    body, limit = {**LONG, "stream": stream}, httpx2.Timeout(60, read=60 if stream else 0.3)
    with contextlib.suppress(httpx2.ReadTimeout), api.http.stream("POST", "/v1/completions", json=body, timeout=limit):
        """Its headers come at once if it is streamed, otherwise only with the answer."""
    whole = the_request(exporter)
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert whole.status.status_code is StatusCode.UNSET
    assert duration(whole) > 0


def test_name_of_the_service_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_name() == "triptych"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-eu")
    assert service_name() == "llm-eu"
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=llm-us,deployment.environment=test")
    assert service_name() == "llm-us"


def service_name() -> object:
    exporter = InMemorySpanExporter()
    tracer = SpanTracer(SimpleSpanProcessor(exporter))
    tracer.failed(Request({"type": "http", "headers": []}), None, 0.1)
    [span] = exporter.get_finished_spans()
    return span.resource.attributes["service.name"]


def the_request(exporter: InMemorySpanExporter) -> ReadableSpan:
    eventually(lambda: any(span.name == "llm_request" for span in exporter.get_finished_spans()))
    [whole] = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    return whole


def duration(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def test_spans_of_a_stream_are_sent_to_the_endpoint(pipeline: Driver) -> None:
    received = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            received.set()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with site(pipeline.run_dir, otlp_traces_endpoint=endpoint) as api:
            api.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, "stream": True})
        collector.shutdown()
        thread.join()
    assert received.is_set()  # when the gateway stops, seconds before they would have been sent


def test_collector_that_does_not_respond_delays_a_stop_only_briefly(pipeline: Driver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/traces"
        with site(pipeline.run_dir, otlp_traces_endpoint=endpoint) as api:
            api.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
            began = time.monotonic()
        assert time.monotonic() - began < FLUSH_S + 2
        [sending] = (thread for thread in threading.enumerate() if thread.name == "last-spans")
        connection, _ = deaf.accept()
        with connection:  # left alone, it would go on trying while other tests run
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            sending.join(20)
    assert not sending.is_alive()


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert type(make_tracer(None)) is Tracer
