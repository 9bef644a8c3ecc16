"""LoRA adapters on the fused decoder: they equal merged weights, and what they cost."""

from __future__ import annotations

from benchmarks.cpu_models import make_adapter
from benchmarks.gpu.models import warm
from benchmarks.gpu.runs import load, run, summary
from benchmarks.gpu.setting import Notes, Setting

NAME, NUM_ADAPTERS = "qwen3-0.6b", 8
CASES = {"none": [0], "one": [1], "eight": list(range(1, NUM_ADAPTERS + 1))}  # assigned to requests in turns


def adapters(setting: Setting, note: Notes) -> None:
    """Eight of Qwen3-0.6B, of rank 16 on all linear layers, at batch 32."""
    folder, checkpoint = setting.folder / "adapters", setting.checkpoint(NAME)
    folder.mkdir()
    numbers = range(1, setting.size(NUM_ADAPTERS, 2) + 1)
    modules = tuple(f"{n}={make_adapter(folder / str(n), checkpoint, n)}" for n in numbers)
    batch = [(setting.size(128, 5), setting.size(256, 3))] * setting.size(32, 2)

    def of(case: str) -> list[int]:
        owners = [owner for owner in CASES[case] if owner <= len(numbers)]
        return [owners[i % len(owners)] for i in range(len(batch))]

    loaded = load(setting, NAME, lora_modules=modules)
    note("equal_merged_weights", True)  # otherwise refused: the self-test compares each with transformers
    note("load_s", loaded.load_s)
    note("capture_s", loaded.capture_s)
    warm(setting, loaded)
    rates = {}
    for case in CASES:
        run(setting, loaded, batch[:4], adapters=of(case), seed=99)
        done = run(setting, loaded, batch, adapters=of(case))
        rates[case] = done.tokens_per_s
        note(case, {**summary(setting, NAME, done), "of_none": round(rates[case] / rates["none"], 3)})
    del loaded
    loaded = load(setting, NAME, deterministic=True, lora_modules=modules)
    owners = [i % (len(numbers) + 1) for i in range(len(batch))]
    runs = [
        run(setting, loaded, batch, adapters=owners, prefill_chunk=setting.size(256, 5), max_num_seqs=rows)
        for rows in (loaded.scheduler_config.num_rows, 1)
    ]
    together, alone = ([s.output_tokens.tolist() for s in done.sequences] for done in runs)
    note("equal_alone_and_together", together == alone)
