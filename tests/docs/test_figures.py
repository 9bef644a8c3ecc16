"""The figures of the pages are those of the files in benchmarks/, rounded as the pages write them."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from tests.docs.pages import DOCS, read

README = "../README.md"
BENCHMARKS = DOCS.parent / "benchmarks"
CORRECT_GUESSES = {"all": "right 1", "8 of 10": "right 0.8", "half": "right 0.5", "none": "right 0"}
PERPLEXITIES = {
    "bfloat16": "bfloat16",
    "bfloat16, `--kv-dtype int8`": "bfloat16, pages int8",
    "`--quantization int8`": "int8, pages int8",
    "`--quantization int8`, `--kv-dtype model`": "int8",
    "`--quantization int4`, which finds the values of the file again": "int4, pages int8",
    "likewise, `--kv-dtype model`": "int4",
}


@cache
def measured(name: str) -> Any:
    return json.loads((BENCHMARKS / f"{name}_epyc-2core_202611.json").read_text(encoding="utf-8"))


def test_every_result_says_what_was_measured_on_what_and_with_which_sources() -> None:
    names = {"what", "hardware", "commit", "versions"}
    lacking = {path.name: names - json.loads(path.read_bytes()).keys() for path in BENCHMARKS.glob("*.json")}
    assert {name: missing for name, missing in lacking.items() if missing} == {}


def table(page: str, header: str) -> dict[str, list[str]]:
    """The cells of each row by the first one, of the only table whose header ends so."""
    [rows] = re.findall(rf"^\|[^\n]*{re.escape(header)}\n\|-[^\n]*\n((?:\|[^\n]*\n)+)", read(page), re.MULTILINE)
    cells = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines())
    return {first: others for first, *others in cells}


def assert_rounded(shown: str, value: float) -> None:
    """The first number of the text is the value, rounded to its decimals."""
    number = re.search(r"-?\d+(?:\.(?P<decimals>\d+))?", shown.replace(",", ""))
    assert number is not None, shown
    tolerance = 0.5000001 * 10 ** -len(number["decimals"] or "")
    assert abs(float(number[0]) - value) <= tolerance, f"{shown} stands for {value}"


@pytest.mark.parametrize("workload", ["W1", "W2", "W3", "W5"])
def test_throughput_beside_other_engines(workload: str) -> None:
    [row] = [cells for first, cells in table(README, "0.6B int4 |").items() if first.startswith(workload)]
    files = ["peers-135m"] * 3 + ["peers-0.6b"] * 3
    for shown, name, dtype in zip(row, files, ["bf16", "int8", "int4"] * 2, strict=True):
        [model] = measured(name)["models"].values()
        assert_rounded(shown, model["medians"][f"triptych {dtype}"][workload]["of_best_peer"])


def test_what_the_readme_says_first_is_the_range_of_its_table() -> None:
    rows = [[float(cell) for cell in row] for row in table(README, "0.6B int4 |").values()]
    ranges = [[row[column] for row in rows for column in columns] for columns in ((0, 3), (1, 4))]
    limits = [limit for numbers in ranges for limit in (min(numbers), max(numbers))]
    assert_stated(
        README, r"it has (\S+) to (\S+) times the throughput .*? bfloat16, and (\S+) to (\S+) times in int8", *limits
    )


def test_servers() -> None:
    ours, vllm = measured("peers-http")["results"].values()
    first, gaps = ([[server[streams][key] for streams in server] for server in (ours, vllm)]
                   for key in ("ttft_p50_ms", "gap_p99_ms"))  # fmt: skip
    three = r"(\S+), (\S+) and (\S+)"
    assert_stated(
        README,
        rf"{three} times the throughput. Half of the first tokens come within {three} s \(vLLM: {three}\), and 99 %"
        rf" of the others within {three} ms of the one before \(vLLM: {three}\)",
        *(ours[streams]["tokens_per_s"] / vllm[streams]["tokens_per_s"] for streams in ours),
        *(milliseconds / 1e3 for server in first for milliseconds in server),
        *(milliseconds for server in gaps for milliseconds in server),
    )


def test_latency_of_arrivals() -> None:
    [model] = measured("peers-135m")["models"].values()
    cases = {engine: case["W4"] for engine, case in model["medians"].items()}
    others = [case for engine, case in cases.items() if not engine.startswith("triptych")]
    rows = table(README, "best of the others, per row |").values()
    for row, key in zip(rows, ("ttft_p50_ms", "itl_p99_ms"), strict=True):
        values = [cases["triptych bf16"][key], cases["triptych int8"][key], min(case[key] for case in others)]
        for shown, milliseconds in zip(row, values, strict=True):
            assert_rounded(shown, milliseconds / 1e3)


@pytest.mark.parametrize(("header", "name", "case"), [
    ("1 stream | 2 | 4 | 8 |", "speculation", "smollm2-135m bf16"),
    ("1 stream | 2 | 4 |", "speculation-draft", "qwen3-4b bf16"),
])  # fmt: skip
def test_speculation(header: str, name: str, case: str) -> None:
    for guesses, row in table("how-to.md", header).items():
        for shown, streams in zip(row, (1, 2, 4, 8), strict=False):
            found = measured(name)["cases"][f"{case} {streams}"]
            assert_rounded(shown, found[CORRECT_GUESSES.get(guesses, "nothing")])


def test_adapters() -> None:
    rows = table("how-to.md", "0.6B, int8 |").values()
    for row, use in zip(rows, ("none", "one", "half", "eight"), strict=True):
        for shown, case in zip(row, measured("lora")["cases"].values(), strict=True):
            assert_rounded(shown, case[use]["answers_of_pairs"])


def test_perplexities() -> None:
    rows, found = table("how-to.md", "the same first choice |"), measured("perplexity-smollm2")
    formats = found["formats"] | found["later"]["formats"]
    shuffled = measured("perplexity-smollm2-shuffled")["formats"]
    values = {row: formats[key] for row, key in PERPLEXITIES.items()}
    values |= {row: shuffled["int8" if "int8`," in row else "int4"] for row in rows.keys() - values.keys()}
    for row, (perplexity, same_choice) in rows.items():
        assert_rounded(perplexity, 100 * (values[row]["of_exact"] - 1))
        assert_rounded(same_choice, 100 * values[row]["same_choice"])


def test_times_of_recovery() -> None:
    rows = table("recovery.md", "started anew, median |")
    forked, anew = measured("chaos")["recovery_s"], measured("chaos_adapters")["recovery_s"]
    for row, role in zip(rows.values(), ("execute", "prepare", "summarize", "driver"), strict=False):
        values = [forked[role]["p50"], forked[role]["p95"], anew[role]["p50"]]
        for shown, seconds in zip(row, values, strict=True):
            assert_rounded(shown, seconds)
    stopped = [forked[f"{role} stopped"] for role in ("execute", "prepare", "summarize")]
    [median, most, _] = list(rows.values())[-1]
    assert_rounded(median, stopped[0]["p50"])
    assert_rounded(most, max(case["p95"] for case in stopped))


def test_chaos_with_adapters() -> None:
    found = measured("chaos_adapters-forked")
    assert found["failures"] == {}
    shown = r"adapters-forked_\S+ had (\S+) kills, (\S+) adapters loaded and (\S+) unloaded. All of (\S+) answers"
    adapters, requests = found["adapters"], found["requests"]
    values = found["kills"]["all"], adapters["loaded"], adapters["unloaded"], requests["whole"]
    assert_stated("recovery.md", shown, *values)


def test_times_of_flushes() -> None:
    found = measured("journal-flush")["microseconds"]
    on_disk = [found["disk"][case]["median"] / 1000 for case in ("an accept, flushed", "a step of 256 rows, flushed")]
    shown = r"`accept` \(default\) .*? \| (\S+) ms per turn .*? \| (\S+) ms per step of 256 rows"
    assert_stated("recovery.md", shown, *on_disk)
    in_memory = found["memory"]["a flush of nothing"]["median"]
    assert_stated("recovery.md", r"On `/dev/shm` a flush takes (\S+) µs", in_memory)


def of_modules(speeds: Any, case: str, workload: str) -> float:
    """How many times as fast as transformers' modules the compiled kernels are."""
    modules = next(case for key, case in speeds.items() if key.endswith("transformers"))
    return float(speeds[case][workload]["tokens_per_s"] / modules[workload]["tokens_per_s"])


def test_speed_beside_transformers() -> None:
    gemma, experts = (measured(name)["cases"] for name in ("cpu_decoder-gemma3", "cpu_experts"))
    speeds = [of_modules(gemma, "gemma3-270m bf16", workload) for workload in ("W2", "W1", "W3")]
    shown = r"a single stream is (\S+) times .*? reaches (\S+) of .*? batch is (\S+) times .*? prompt (\S+) times"
    of_memory = gemma["gemma3-270m bf16"]["W2"]["of_memory"]
    assert_stated(README, f"Gemma 3 270M .*?{shown}", speeds[0], of_memory, *speeds[1:])
    speeds = [of_modules(experts, "bf16", f"decode of {streams}") for streams in (1, 8, 32)]
    limits, shown = (min(speeds), max(speeds)), r"decode (\S+) to (\S+) times as fast"
    of_memory = experts["bf16"]["decode of 1"]["of_memory"]
    assert_stated(README, f"Mixture of experts .*?{shown} .*? reaches (\\S+) of", *limits, of_memory)
    assert_stated("../CHANGELOG.md", f"Mixture-of-experts .*?{shown}", *limits)
    recurrent = of_modules(measured("cpu_decoder-qwen3.5")["later"]["cases"], "qwen3.5-0.8b bf16", "W2")
    assert_stated("../CHANGELOG.md", r"Qwen3.5-0.8B in bfloat16, one stream decodes (\S+) times", recurrent)


def test_throughput_of_a_gateway() -> None:
    found = measured("gateway")["results"]
    assert_stated("http.md", r"takes (\S+) µs of processor time per token", found["gateway_cpu_us_per_token"])
    assert_stated("http.md", r"(\S+),000 tokens per second of the hash model", found["flooded"]["tokens_per_s"] / 1000)


def test_attention_in_8_bits() -> None:
    cases = measured("eight_bit_pages")["cases"].values()
    sequences = r"8 sequences of 2,048 tokens decode (\S+) to (\S+) times as fast, and 8 of 8,192 tokens (\S+) to (\S+)"
    found = [[case[shape]["speed"] for case in cases] for shape in ("prompt of 1024", "8 x 2048", "8 x 8192")]
    limits = [limit for speeds in found for limit in (min(speeds), max(speeds))]
    assert_stated("how-to.md", rf"1,024 tokens is computed (\S+) to (\S+) times as fast, {sequences} times", *limits)


def test_chaos() -> None:
    found = measured("chaos")
    requests = found["requests"]
    num_requests = sum(requests[end] for end in ("whole", "aborted", "vanished", "refused"))
    counts = [found["kills"]["all"], found["faults"]["segv one"], num_requests / 1000, requests["tokens"] / 1e6]
    assert_stated(
        "recovery.md", r"had (\S+) kills, (\S+) crashes, (\d+),000 requests and (\S+) million tokens", *counts
    )
    assert_stated("recovery.md", r"all of (\d+) planted poisonous requests", requests["poison_named"])


def test_pause_after_a_kill() -> None:
    results = measured("kill_pause")["results"]
    seconds = [results[kept]["all_s"] for kept in ("pages and weights", "pages", "nothing")]
    sentence = r"all go on (\S+) s after `kill -9`, (\S+) s if the weights .*? and (\S+) s if keys and values"
    assert_stated("decisions/0071-packed-weights-outlive-execute.md", sentence, *seconds)
    kept, _, again = seconds
    assert_stated(
        "recovery.md", r"tokens after (\S+) s, of which the last would otherwise go on after (\S+) s", kept, again
    )
    assert_stated("../README.md", r"prompts of 1,000 tokens go on after (\S+) s instead of (\d+)", kept, again)


def assert_stated(page: str, sentence: str, *values: float) -> None:
    """The page has the sentence once, however it is wrapped, and its groups are these values."""
    [found] = re.finditer(sentence, re.sub(r"\s+", " ", read(page)))
    for shown, value in zip(found.groups(), values, strict=True):
        assert_rounded(shown, value)
