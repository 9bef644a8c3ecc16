"""``triptych bench`` on a running pipeline, on its own pipeline, and on a server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.bench.fake_openai import FakeOpenAI, serving
from tests.launch.conftest import Outcome, Triptych
from tests.launch.own_terminal import terminal
from tests.waiting import eventually

SMALL = ("--num-prompts", "6", "--num-warmups", "1", "--input-len", "8..20", "--output-len", "5")


@pytest.fixture
def bench(triptych: Triptych, tmp_path: Path) -> Triptych:
    """Run the verb with a small load and write its results to a file."""
    return lambda *arguments: triptych("bench", *SMALL, "--output", tmp_path / "out.json", *arguments)


def result_in(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return result


def test_running_pipeline_is_measured(bench: Triptych, run_dir: str, tmp_path: Path) -> None:
    outcome = bench("--connect", run_dir, "--shared-prefix", "64", "--ttft-target-ms", "60000")
    assert (outcome.code, outcome.err) == (0, "")
    for words in ("6 of 6", "time to first token", "inter-token", "p99", "goodput", "100% of all", "= wall"):
        assert words in outcome.out
    result = result_in(tmp_path)
    assert (result["target"], result["summary"]["num_output_tokens"]) == ("hash-lm", 30)
    assert [request["num_prompt_tokens"] - 64 in range(8, 21) for request in result["requests"]] == [True] * 6
    assert result["summary"]["num_cached_tokens"] >= 64  # the warm-up left the prefix in the cache
    first = result["requests"][0]
    assert first["ttft_ms"] > 0
    assert sum(first["stages_ms"].values()) <= first["e2e_ms"]


def test_pipeline_is_started_if_none_is_named(bench: Triptych, tmp_path: Path) -> None:
    outcome = bench("hash-lm", "--request-rate", "200", "--arrival", "fixed", "--itl-target-ms", "50")
    assert outcome.code == 0
    result = result_in(tmp_path)
    assert [request["scheduled_s"] for request in result["requests"]] == [index / 200 for index in range(6)]
    assert result["summary"]["goodput"]["itl_target_ms"] == 50


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_server_is_measured(bench: Triptych, tmp_path: Path, endpoint: str) -> None:
    with serving(FakeOpenAI()) as server:
        outcome = bench("--url", server.url + "/v1", "--endpoint", endpoint, "--api-key", "s3cret")
    assert (outcome.code, outcome.err) == (0, "")
    result = result_in(tmp_path)
    summary = result["summary"]
    assert (summary["num_prompt_tokens"], summary["num_output_tokens"], summary["num_cached_tokens"]) == (66, 30, 18)
    assert result["requests"][0]["ttft_ms"] >= 2
    assert len(result["requests"][0]["gaps_ms"]) == 4  # the empty first event of a chat is not a token
    assert result["target"] == f"fake-model at {server.url}/v1"
    assert len(server.asked) == 7
    assert all(body["model"] == "fake-model" and body["ignore_eos"] and body["stream"] for body in server.asked)
    assert "Authorization: Bearer s3cret\r\n" in server.headers[-1]
    assert "s3cret" not in (tmp_path / "out.json").read_text() + outcome.out


def test_each_event_counts_as_a_token_if_the_server_sends_no_usage(bench: Triptych, tmp_path: Path) -> None:
    with serving(FakeOpenAI(with_usage=False)) as server:
        assert bench("--url", server.url, "--no-ignore-eos", "--served-model", "mine").code == 0
    assert result_in(tmp_path)["summary"]["num_output_tokens"] == 30
    assert "ignore_eos" not in server.asked[0]
    assert server.asked[0]["model"] == "mine"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])  # DeepSeek uses the first name, vLLM the second
def test_reasoning_counts_as_tokens_under_either_field_name(bench: Triptych, tmp_path: Path, key: str) -> None:
    with serving(FakeOpenAI(with_usage=False, delta_key=key)) as server:
        assert bench("--url", server.url, "--endpoint", "chat").code == 0
    assert result_in(tmp_path)["summary"]["num_output_tokens"] == 30


def test_stages_of_our_gateway_are_shown(bench: Triptych, tmp_path: Path) -> None:
    with serving(FakeOpenAI(stages_ms={"prefill": 2.0, "decode": 8.0})) as server:
        outcome = bench("--url", server.url)
    assert result_in(tmp_path)["summary"]["stages_ms"] == {"prefill": 2.0, "decode": 8.0}
    assert "80%" in outcome.out


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (FakeOpenAI(status=429), "http_429"),
        (FakeOpenAI(cut_after=2), "cut_short"),
        (FakeOpenAI(error="no room"), "error"),
        (FakeOpenAI(error={"code": 500}), "500"),
    ],
    ids=["refused", "cut", "a text", "a code"],
)
def test_failures_are_counted_by_reason(bench: Triptych, tmp_path: Path, server: FakeOpenAI, error: str) -> None:
    with serving(server):
        outcome: Outcome = bench("--url", server.url)
    assert outcome.code == 1
    assert f"failed: 6 {error}" in outcome.out
    assert result_in(tmp_path)["summary"]["errors"] == {error: 6}


def test_missing_server_is_one_clear_line(bench: Triptych) -> None:
    outcome = bench("--url", "http://127.0.0.1:9")
    assert outcome.code == 2
    assert "error: http://127.0.0.1:9/v1/models: ConnectionRefusedError" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request-rate", "0"], "request_rate is 0.0, the least is 0.001"),
        (["--request-rate", "nan"], "request_rate is nan"),
        (["--num-prompts", "0"], "num_prompts is 0, the least is 1"),
        (["--arrival", "never"], "arrival is 'never', known are: poisson, fixed"),
        (["--url", "localhost"], "it must begin with http://"),
        (["--url", "http://x", "--connect", "y"], "give --url or --connect, not both"),
        (["--url", "http://x", "--page-size", "4"], "--page-size: the pipeline at http://x is already running"),
        (["--plot", "a.jpeg"], "must end in .png"),
        (["--output", "/none/a.json"], "cannot write /none/a.json: No such file"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, list) else "",
)
def test_impossible_load_is_refused_before_it_begins(triptych: Triptych, arguments: list[str], words: str) -> None:
    outcome = triptych("bench", *arguments)
    assert outcome.code in (1, 2)
    assert words in outcome.err


def test_plot_is_written(bench: Triptych, run_dir: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench("--connect", run_dir, "--plot", tmp_path / "a.png", "--ttft-target-ms", "5").code == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_missing_matplotlib_is_reported_before_the_load(
    triptych: Triptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = triptych("bench", "hash-lm", "--plot", tmp_path / "a.png")
    assert (outcome.code, "pip install 'triptych[bench]'" in outcome.err) == (2, True)


def test_ctrl_c_reports_the_requests_that_ended(run_dir: str, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    load = ("--num-prompts", "2000", "--request-rate", "50", "--output-len", "2", "--output", str(output))
    with terminal("bench", "--connect", run_dir, *load) as screen:
        screen.see("under way")
        eventually(lambda: re.search(r" ([3-9]|\d\d+)/2000", screen.text), timeout=60)
        screen.type("\x03")
        assert screen.wait() == 130
        assert "these are the requests that had ended" in screen.text
    summary = json.loads(output.read_text())["summary"]
    assert 3 <= summary["num_answered"] == summary["num_requests"] < 2000
