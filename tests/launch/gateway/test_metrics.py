"""/metrics as Prometheus reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.launch.gateway.conftest import Site, site
from tests.waiting import eventually
from triptych import Driver

# What vLLM's dashboard, the schedulers of llm-d and the gateway API read.
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "cache_config_info", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)  # fmt: skip
LAUNCH = Path(__file__).parents[3] / "launch"
DASHBOARD = LAUNCH / "gateway" / "grafana.json"
ALERTS = LAUNCH / "deploy" / "alerts.yaml"


def samples(api: Site) -> dict[str, float]:
    """Values by name and labels, without the model label."""
    text = api.http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + (json.dumps(labels, sort_keys=True) if labels else "")] = sample.value
    return found


def names(api: Site) -> set[str]:
    return {name.partition("{")[0] for name in samples(api)}


def test_vllm_metric_names_exist(api: Site) -> None:
    api.ask("/v1/completions", prompt="hi", max_tokens=5)
    assert {f"vllm:{name}" for name in VLLM} <= names(api)
    rows = [row for row in api.http.get("/metrics").text.splitlines() if row.startswith("vllm:")]
    assert not [row for row in rows if 'model_name="hash-lm"' not in row]
    [labels] = [row.partition("{")[2] for row in rows if row.startswith("vllm:cache_config_info{")]
    for label in ('block_size="16"', 'num_gpu_blocks="4096"', 'enable_prefix_caching="True"'):
        assert label in labels
    assert 'cache_dtype="model"' in labels  # not "auto": what is in use


def test_each_request_counts_once_whichever_gateway_is_asked() -> None:
    with Driver("hash-lm") as driver, site(driver.run_dir) as one, site(driver.run_dir) as other:
        one.ask("/v1/completions", prompt=[1, 2, 3], max_tokens=10)
        other.ask("/v1/completions", prompt=[1, 2, 3], max_tokens=10)
        one.ask("/tokenize", messages=[{"role": "user", "content": "hi"}])  # computes nothing, so it does not count
        driver.generate([1, 2, 3], max_tokens=10)
        one.ask("/v1/embeddings", input=[1, 2, 3])
        eventually(lambda: samples(one)["vllm:e2e_request_latency_seconds_count"] == 4)
        eventually(lambda: samples(one)["vllm:prompt_tokens_total"] == 12)  # another process publishes it
        for api in (one, other):
            found = samples(api)
            assert found["vllm:e2e_request_latency_seconds_count"] == 4
            assert found["vllm:generation_tokens_total"] == 30
            assert found["vllm:prompt_tokens_total"] == 12
            assert found["vllm:time_to_first_token_seconds_count"] == 3
            assert found["vllm:inter_token_latency_seconds_count"] == 27
            assert found['vllm:request_success_total{"finished_reason": "length"}'] == 3
            assert found['vllm:request_success_total{"finished_reason": "embedding"}'] == 1  # no answer that was cut
            assert found["vllm:request_generation_tokens_sum"] == 30


def test_histograms_are_cumulative_and_end_with_their_count(api: Site) -> None:
    api.ask("/v1/completions", prompt="hi", max_tokens=5)
    text = api.http.get("/metrics").text
    rows = re.findall(r'vllm:e2e_request_latency_seconds_bucket{le="([^"]+)".*} (\S+)', text)
    counts = [float(count) for _, count in rows]
    assert counts == sorted(counts)
    assert rows[-1][0] == "+Inf"
    assert re.findall(r"vllm:e2e_request_latency_seconds_count\S* (\S+)", text) == [str(counts[-1])]


def test_stages_and_gateways_have_their_own_metrics(api: Site) -> None:
    api.ask("/v1/completions", prompt="hi", max_tokens=5)
    decode = 'triptych_request_stage_seconds_total{"stage": "decode"}'
    eventually(lambda: samples(api).get(decode, 0) > 0)  # summarize publishes it shortly after the answer
    found = samples(api)
    assert found['triptych_stage_healthy{"stage": "execute"}'] == 1
    assert found['triptych_http_requests_total{"gateway": "0", "route": "/v1/completions", "status": "200"}'] >= 1


def num_pages(api: Site) -> float:
    return sum(value for name, value in samples(api).items() if name.startswith("triptych_pages{"))


def test_each_page_is_in_one_state(api: Site) -> None:
    api.ask("/v1/completions", prompt="hi", max_tokens=5)
    assert num_pages(api) == 4096


def dashboard() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alerts() -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(("expressions", "least"), [(dashboard(), 16), (alerts(), 7)], ids=["dashboard", "alerts"])
def test_what_is_asked_of_the_metrics_exists(api: Site, expressions: list[str], least: int) -> None:
    api.ask("/v1/completions", prompt="hi", max_tokens=5)
    api.refusal("/v1/completions", prompt=[5] * 5000)
    asked = set(re.findall(r"(?:vllm:|triptych_)\w+", " ".join(expressions)))
    assert len(asked) >= least
    eventually(lambda: asked <= names(api))
    given = list(samples(api))
    for name, label in re.findall(r"((?:vllm:|triptych_)\w+)\{(?!model_name)(\w+)=", " ".join(expressions)):
        assert [each for each in given if each.startswith(name + "{") and f'"{label}": ' in each], (name, label)


def test_own_metrics_are_in_the_units_of_prometheus(api: Site) -> None:
    """Seconds and bytes, by whole words, as ``promtool check metrics`` demands."""
    own = {name for name in names(api) if name.startswith("triptych_")}
    assert {"triptych_step_median_seconds", "triptych_step_max_seconds"} <= own
    assert not [name for name in own if {"ms", "us", "s", "kib", "mib"} & set(name.split("_"))]
