"""Prometheus metrics of the whole pipeline, generated on request.

Nothing is counted here: every figure comes from the board, written by the workers, or from the gateways' own counters.
So each request counts once, whichever client sent it and whichever gateway process is asked; metrics named as in vLLM
have the same meaning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ...protocol.lora import MAX_ADAPTERS
from .health import degradations, stages

if TYPE_CHECKING:
    from .state import Gateway

CONTENT_TYPE = CONTENT_TYPE_LATEST
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft_s", "from receipt to the first token"),
    "inter_token_latency_seconds": ("inter_token_s", "between two tokens of a request"),
    "request_time_per_output_token_seconds": ("time_per_output_token_s", "mean time between a request's tokens"),
    "e2e_request_latency_seconds": ("e2e_s", "from receipt to the end"),
    "request_queue_time_seconds": ("queue_s", "from receipt to the first step, without tokenization"),
    "request_prefill_time_seconds": ("prefill_s", "from the first step to the first token"),
    "request_decode_time_seconds": ("decode_s", "from the first token to the last"),
    "request_inference_time_seconds": ("inference_s", "from the first step to the last token"),
    "request_prompt_tokens": ("prompt_tokens", "tokens of a prompt"),
    "request_generation_tokens": ("output_tokens", "tokens of an answer"),
}
_STAGE_GAUGES = {
    "live_requests": ("prepare", "live", "requests that hold a credit"),
    "max_live_requests": ("prepare", "max_live", "credits"),
    "pending_bytes": ("prepare", "pending_bytes", "bytes of prompts waiting for the tokenizer"),
    "journal_records_used": ("prepare", "records_used", "records of the journal in use"),
    "journal_records_free": ("prepare", "records_free", "free records of the journal"),
    "ready_sequences": ("execute", "ready", "prefilled sequences waiting for a row"),
    "decoding_sequences": ("execute", "decoding", "sequences in the decode batch"),
    "prefilling_sequences": ("execute", "prefilling", "sequences whose prompt is being computed"),
    "unread_answers": ("summarize", "unread", "answers that ended and were not acknowledged"),
    "followed_answers": ("summarize", "followed", "answers followed by a client"),
    "tokens_per_second": ("summarize", "tokens_per_second", "of all answers together"),
}
_STEP_GAUGES = {"median": "median duration of the last steps", "max": "longest of the last steps"}
_STAGE_COUNTERS = {
    "steps": ("execute", "steps", "forward passes"),
    "prefill_tokens": ("execute", "prefill_tokens", "computed prompt tokens"),
    "swaps": ("execute", "swaps", "sequences moved to host memory"),
    "forgotten_unread": ("summarize", "forgotten_unread", "answers dropped unread"),
    "stale_tokens": ("summarize", "stale_tokens", "tokens that arrived after the end of their request"),
}
_PAGES = ("free", "held", "cached", "limbo", "lost")


def render(gateway: Gateway) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(gateway))
    return bytes(generate_latest(registry))


class _Collector:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        stats, name = gateway.board.stats(), gateway.model_names[0]
        if all("phase" in stage and len(stage) > 2 for stage in stats.values()):  # all have published statistics
            yield from _vllm(stats, name, gateway)
            yield from _pipeline(stats, name)
            yield from _adapters(stats, name, gateway)
        yield from _health(gateway, name)
        yield from _http(gateway, name)


def _vllm(stats: Mapping[str, Any], name: str, gateway: Gateway) -> Iterator[Metric]:
    prepare, execute, summarize = stats["prepare"], stats["execute"], stats["summarize"]
    num_used = execute["pages"] - execute["pages_free"] - execute["pages_cached"]
    running = execute["prefilling"] + execute["ready"] + execute["decoding"]
    waiting = prepare["waiting"] + execute["waiting"]
    yield _gauge("vllm:num_requests_running", "requests that have pages", running, name)
    yield _gauge("vllm:num_requests_waiting", "requests accepted and not started", waiting, name)
    yield _gauge("vllm:num_requests_swapped", "requests swapped out", execute["swapped"], name)
    share = num_used / execute["pages"] if execute["pages"] else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "share of the pages in use, from 0 to 1", share, name)
    yield _counter("vllm:prefix_cache_queries", "prompt tokens looked up", execute["cache_queries"], name)
    yield _counter("vllm:prefix_cache_hits", "prompt tokens found", execute["cache_hits"], name)
    yield _counter("vllm:num_preemptions", "sequences preempted", execute["preemptions"], name)
    yield _counter("vllm:spec_decode_num_draft_tokens", "tokens proposed", execute["proposed_tokens"], name)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "proposed tokens accepted", execute["accepted_tokens"], name)
    yield _counter("vllm:prompt_tokens", "tokens of accepted prompts", prepare["prompt_tokens"], name)
    yield _counter("vllm:generation_tokens", "tokens of answers", summarize["tokens"], name)
    success = CounterMetricFamily(
        "vllm:request_success", "requests that ended", labels=["model_name", "finished_reason"]
    )
    for reason, count in summarize["finished"].items():
        success.add_metric([name, reason], count)
    yield success
    histograms = summarize["histograms"]
    for metric, (key, text) in _HISTOGRAMS.items():
        yield _histogram(f"vllm:{metric}", text, histograms[key], name)
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "configuration of the KV cache",
        labels=["model_name", "block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching"],
    )  # fmt: skip
    card, shares_prefixes = gateway.card, gateway.pipeline.cache.prefix_cache
    info.add_metric((name, str(card.page_size), card.kv_dtype, str(execute["pages"]), str(shares_prefixes)), 1)
    yield info


def _pipeline(stats: Mapping[str, Any], name: str) -> Iterator[Metric]:
    for metric, (stage, key, text) in _STAGE_GAUGES.items():
        yield _gauge(f"triptych_{metric}", text, stats[stage].get(key) or 0, name)
    for of, text in _STEP_GAUGES.items():
        yield _gauge(f"triptych_step_{of}_seconds", text, (stats["execute"].get(f"step_ms_{of}") or 0) / 1e3, name)
    for metric, (stage, key, text) in _STAGE_COUNTERS.items():
        yield _counter(f"triptych_{metric}", text, stats[stage].get(key) or 0, name)
    pages = GaugeMetricFamily("triptych_pages", "KV pages by state", labels=["model_name", "state"])
    for state in _PAGES:
        pages.add_metric([name, state], stats["execute"][f"pages_{state}"])
    yield pages
    refused = CounterMetricFamily("triptych_rejected", "refused requests", labels=["model_name", "code"])
    for code, count in stats["prepare"]["rejected"].items():
        refused.add_metric([name, code], count)
    yield refused
    spent = CounterMetricFamily(
        "triptych_request_stage_seconds", "time spent by all ended requests, by stage", labels=["model_name", "stage"]
    )
    for stage, seconds in stats["summarize"]["histograms"]["stages_s"].items():
        spent.add_metric([name, stage], seconds)
    yield spent


def _adapters(stats: Mapping[str, Any], name: str, gateway: Gateway) -> Iterator[Metric]:
    if not gateway.adapters:
        return
    ended = CounterMetricFamily(
        "triptych_adapter_requests", "ended answers of an adapter", labels=["model_name", "adapter"]
    )
    for adapter in gateway.adapters:
        ended.add_metric([name, adapter], stats["summarize"]["adapted"].get(adapter, 0))
    yield ended
    # What Kubernetes' inference extension asks of a server, to send requests where their adapter is in memory.
    loaded = GaugeMetricFamily(
        "vllm:lora_requests_info", "the adapters in memory, all of which may be in use; the time of this report",
        labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )  # fmt: skip
    loaded.add_metric([name, str(MAX_ADAPTERS), ",".join(gateway.adapters), ""], time.time())
    yield loaded


def _health(gateway: Gateway, name: str) -> Iterator[Metric]:
    found = stages(gateway.board, gateway.pipeline.supervisor)
    for metric, key, text in (
        ("triptych_stage_healthy", "healthy", "1 if the stage is ready and makes progress"),
        ("triptych_stage_life", "life", "how often the stage was started"),
        ("triptych_stage_progress_age_seconds", "progress_age_s", "since the last progress of the stage"),
    ):
        family = GaugeMetricFamily(metric, text, labels=["model_name", "stage"])
        for stage, values in found.items():
            family.add_metric([name, stage], float(values[key]))
        yield family
    degraded = GaugeMetricFamily(
        "triptych_degraded", "1 if the pipeline answers in this degraded state", labels=["model_name", "reason"]
    )
    for reason, is_so in degradations(gateway.board, gateway.run_dir, gateway.pipeline).items():
        degraded.add_metric([name, reason], float(is_so))
    yield degraded


def _http(gateway: Gateway, name: str) -> Iterator[Metric]:
    labels = ["model_name", "gateway"]
    requests = CounterMetricFamily("triptych_http_requests", "HTTP requests", labels=[*labels, "route", "status"])
    seconds = CounterMetricFamily("triptych_http_request_seconds", "time spent on them", labels=[*labels, "route"])
    gone = CounterMetricFamily("triptych_http_disconnects", "requests whose client disconnected", labels=labels)
    under_way = GaugeMetricFamily("triptych_http_requests_open", "HTTP requests in progress", labels=labels)
    for index, counts in gateway.counters.of_all_processes():
        for route, status, count in counts["requests"]:
            requests.add_metric([name, index, route, status], count)
        for route, total in counts["seconds"].items():
            seconds.add_metric([name, index, route], total)
        gone.add_metric([name, index], counts["disconnects"])
        under_way.add_metric([name, index], counts["open"])
    yield from (requests, seconds, gone, under_way)


def _gauge(metric: str, text: str, value: float, name: str) -> Metric:
    family = GaugeMetricFamily(metric, text, labels=["model_name"])
    family.add_metric([name], value)
    return family


def _counter(metric: str, text: str, value: float, name: str) -> Metric:
    family = CounterMetricFamily(metric, text, labels=["model_name"])
    family.add_metric([name], value)
    return family


def _histogram(metric: str, text: str, wire: Mapping[str, Any], name: str) -> Metric:
    family = HistogramMetricFamily(metric, text, labels=["model_name"])
    bounds = [*(str(float(bound)) for bound in wire["bounds"]), "+Inf"]
    family.add_metric([name], list(zip(bounds, accumulate(wire["counts"]), strict=True)), wire["sum"])
    return family
