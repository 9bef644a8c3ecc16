"""A mixture of experts on the fused decoder, compared with transformers' modules in the same engine with graphs."""

from __future__ import annotations

from benchmarks.gpu.models import even_lengths, one_stream, peer_lengths, warm
from benchmarks.gpu.runs import load, note_start, run, summary
from benchmarks.gpu.setting import Notes, Setting

NAME = "qwen3-moe-8b"


def experts(setting: Setting, note: Notes) -> None:
    """128 experts, 8 per token: one stream compared with memory, and 256 requests of 1024 in and 256 out."""
    loaded = load(setting, NAME)
    note_start(note, loaded)
    warm(setting, loaded)
    note("batch_1", one_stream(setting, NAME, loaded))
    note("throughput", summary(setting, NAME, run(setting, loaded, even_lengths(setting, 256))))
    ours = summary(setting, NAME, run(setting, loaded, peer_lengths(setting)))
    note("peer_workload", ours)
    del loaded
    loaded = load(setting, NAME, deterministic=True)
    lengths = [(setting.size(100 + 37 * i, 3 + 2 * i), setting.size(64, 3)) for i in range(setting.size(16, 2))]
    together = run(setting, loaded, lengths, prefill_chunk=setting.size(256, 5))
    alone = run(setting, loaded, lengths, prefill_chunk=setting.size(2048, 16), max_num_seqs=1)
    texts = [[s.output_tokens.tolist() for s in done.sequences] for done in (together, alone)]
    note("equal_alone_and_together", texts[0] == texts[1])
    del loaded
    loaded = load(setting, NAME, backend="transformers")
    warm(setting, loaded)
    modules = summary(setting, NAME, run(setting, loaded, peer_lengths(setting)))
    note("transformers_modules", modules)
    note("of_transformers_modules", round(ours["output_tokens_per_s"] / modules["output_tokens_per_s"], 3))
