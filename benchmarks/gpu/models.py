"""The workloads: two shapes of Qwen3 with random weights through the engine in this process."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.cpu_models import num_step_weights, num_weights
from benchmarks.gpu.runs import Lengths, Loaded, load, note_start, run, summary
from benchmarks.gpu.setting import Notes, Setting
from benchmarks.gpu.step_times import step_times

SAMPLED = {  # beside greedy: sampling at the end of a graph, and after one; penalties also make steps serial
    "drawn": {"temperature": 1.0},
    "top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "logprobs": {"temperature": 1.0, "logprobs": 5},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.1},
}


def nano_lengths(setting: Setting) -> list[Lengths]:
    """256 requests, in and out uniform from 100 to 1024: the benchmark of nano-vllm."""
    rng = random.Random(0)
    low, high = setting.size(100, 2), setting.size(1024, 4)
    return [(rng.randint(low, high), rng.randint(low, high)) for _ in range(setting.size(256, 2))]


def even_lengths(setting: Setting, num_out: int) -> list[Lengths]:
    """256 requests of 1024 in."""
    return [(setting.size(1024, 12), setting.size(num_out, 3))] * setting.size(256, 2)


def peer_lengths(setting: Setting) -> list[Lengths]:
    """Requests that transformers gets too."""
    return [(setting.size(512, 6), setting.size(256, 2))] * setting.size(128, 3)


def warm(setting: Setting, loaded: Loaded) -> None:
    """Compile everything that is compiled at its first use."""
    run(setting, loaded, [(setting.size(300, 6), setting.size(4, 2))] * setting.size(40, 1), seed=99)


def small(setting: Setting, note: Notes) -> None:
    """Qwen3-0.6B: throughput, the benefit of graphs and overlap, and the idle share at batch 32."""
    loaded = load(setting, "qwen3-0.6b")
    note_start(note, loaded)
    warm(setting, loaded)
    note("throughput", summary(setting, "qwen3-0.6b", run(setting, loaded, nano_lengths(setting))))
    batch = [(setting.size(128, 5), setting.size(256, 3))] * setting.size(32, 2)
    runs = {depth: run(setting, loaded, batch, depth=depth) for depth in (0, 1)}
    for depth, name in ((1, "batch_32"), (0, "batch_32_serial")):
        note(name, summary(setting, "qwen3-0.6b", runs[depth]))
    texts = [[s.output_tokens.tolist() for s in done.sequences] for done in runs.values()]
    note("overlapped_equals_serial", texts[0] == texts[1])
    peer = summary(setting, "qwen3-0.6b", run(setting, loaded, peer_lengths(setting)))
    note("peer_workload", peer)
    for name, sampling in SAMPLED.items():
        # Once before, until these graphs are captured.
        run(setting, loaded, [(num_in, setting.size(40, 2)) for num_in, _ in batch], seed=98, sampling=sampling)
        done = run(setting, loaded, batch, sampling=sampling)
        note(f"batch_32_{name}", summary(setting, "qwen3-0.6b", done))
    runner: Any = loaded.runner
    graphs, runner._graphs = runner._graphs, None
    note("batch_32_without_graphs", summary(setting, "qwen3-0.6b", run(setting, loaded, batch)))
    runner._graphs = graphs
    note("step_times", step_times(setting, loaded))  # last: a profiler may slow down what comes after it


def large(setting: Setting, note: Notes) -> None:
    """Qwen3-8B: one stream compared with memory, and 256 requests of 1024 in and out."""
    loaded = load(setting, "qwen3-8b")
    note_start(note, loaded)
    warm(setting, loaded)
    note("batch_1", one_stream(setting, "qwen3-8b", loaded))
    prompt = run(setting, loaded, [(setting.size(1024, 9), 1)] * setting.size(16, 2), seed=3)
    layers, _ = num_weights(setting.shape("qwen3-8b"))
    rate = setting.found("limits").get("matmul_flop_per_s")
    num_prompt_tokens = sum(s.num_prompt_tokens for s in prompt.sequences)
    note("prefill_of_matmul", rate and round(2 * layers * num_prompt_tokens / prompt.elapsed_s / rate, 4))
    note("throughput", summary(setting, "qwen3-8b", run(setting, loaded, even_lengths(setting, 1024))))
    note("peer_workload", summary(setting, "qwen3-8b", run(setting, loaded, peer_lengths(setting))))
    note("step_times", step_times(setting, loaded))


def one_stream(setting: Setting, name: str, loaded: Loaded, weight_bytes: int = 2) -> dict[str, float | None]:
    """Decoded tokens per second, without the prompt, and the rate of reading weights as a share of the copy's rate."""
    short, long = (run(setting, loaded, [(setting.size(128, 5), n)], seed=n) for n in (2, setting.size(258, 4)))
    num_tokens = long.sequences[0].max_tokens - 2
    rate = num_tokens / max(1e-9, long.elapsed_s - short.elapsed_s)
    layers, head = num_step_weights(setting.shape(name), 1), num_weights(setting.shape(name))[1]
    limit = setting.found("limits").get("copy_bytes_per_s")
    share = round(rate * (layers * weight_bytes + head * 2) / limit, 4) if limit else None
    return {"tokens_per_s": round(rate, 2), "of_bandwidth": share}


def deterministic(setting: Setting, note: Notes) -> None:
    """``--deterministic``: the same bits in any batch and chunks, and what that costs."""
    loaded = load(setting, "qwen3-0.6b", deterministic=True)
    lengths = [(setting.size(100 + 37 * i, 3 + 2 * i), setting.size(64, 3)) for i in range(setting.size(16, 2))]
    together = run(setting, loaded, lengths, prefill_chunk=setting.size(256, 5))
    expected = [s.output_tokens.tolist() for s in together.sequences]
    alone = run(setting, loaded, lengths, prefill_chunk=setting.size(2048, 16), max_num_seqs=1)
    note("equal_alone_and_together", [s.output_tokens.tolist() for s in alone.sequences] == expected)
    del loaded
    loaded = load(setting, "qwen3-8b", deterministic=True)
    warm(setting, loaded)
    # A quarter of the output first, where prompts weigh more: a lower bound, in case time runs out.
    for num_out in (256, 1024):
        done = run(setting, loaded, even_lengths(setting, num_out))
        note("throughput", {"num_out": num_out, **summary(setting, "qwen3-8b", done)})


def fp8(setting: Setting, note: Notes) -> None:
    """Qwen3-8B with weights in eight bits."""
    loaded = load(setting, "qwen3-8b", quantization="fp8")
    warm(setting, loaded)
    note("batch_1", one_stream(setting, "qwen3-8b", loaded, weight_bytes=1))
    note("peer_workload", summary(setting, "qwen3-8b", run(setting, loaded, peer_lengths(setting))))


def int8_pages(setting: Setting, note: Notes) -> None:
    """Qwen3-8B with keys and values in eight bits. A dry run is on a CPU, where only compiled kernels have them."""
    loaded = load(setting, "qwen3-8b", kv_dtype="auto" if setting.is_dry else "int8")
    note("num_pages", loaded.card.num_pages)
    warm(setting, loaded)
    note("batch_1", one_stream(setting, "qwen3-8b", loaded))
    note("peer_workload", summary(setting, "qwen3-8b", run(setting, loaded, peer_lengths(setting))))
    note("throughput", summary(setting, "qwen3-8b", run(setting, loaded, even_lengths(setting, 1024))))
