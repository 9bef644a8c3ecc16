"""How long it takes to unpack a GGUF file, once, and how much memory: a random one of the shape of Qwen3-0.6B or 8B.

The file is made in a temporary folder, and unpacked in a new process, whose memory is measured before, at its peak and
afterwards. Prints one JSON line. ``--shape 8b`` needs 21 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import environment, publish

SHAPES = {  # layers, hidden and inner size, heads, whether the head is the embedding
    "0.6b": (28, 1024, 3072, 16, True),
    "8b": (36, 4096, 12288, 32, False),
}
NUM_IDS, HEAD_DIM, NUM_KV_HEADS = 151_936, 128, 8
SCALES = {Type.Q8_0: 2, Type.Q4_0: 2, Type.Q4_K: 4}  # the first bytes of a block, which hold float16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--type", choices=[type_.name for type_ in SCALES], default="Q8_0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--unpack", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.unpack is not None:
        unpack(arguments.unpack)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        make_file(file, arguments.shape, Type[arguments.type])
        runs = [run(file, Path(folder) / f"cache-{repeat}") for repeat in range(arguments.repeats)]
        report = {
            "what": "gguf_unpack", **environment("gguf", "transformers", "torch"), "seed": 0,
            "config": {"shape": arguments.shape, "type": arguments.type, "file_mb": file.stat().st_size // 10**6},
            "repeats": arguments.repeats, "best": min(runs, key=lambda found: found["seconds"]),
            "most_seconds": max(found["seconds"] for found in runs),
        }  # fmt: skip
    publish(report)


def run(file: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--unpack", str(file)]
    done = subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(cache)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def unpack(file: Path) -> None:
    """In a process of its own."""
    from triptych.workers.execute.model.checkpoint.find import find_checkpoint
    from triptych.workers.execute.model.checkpoint.gguf import unpack as _  # noqa: F401  libraries take memory by themselves

    before, start, used_s = resident_mb(), time.monotonic(), time.process_time()
    folder = find_checkpoint(file)
    found = {
        "seconds": round(time.monotonic() - start, 1),
        "processor_s": round(time.process_time() - used_s, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "before_mb": before,
        "after_mb": resident_mb(),
        "made_mb": sum(made.stat().st_size for made in folder.iterdir()) // 10**6,
    }
    start = time.monotonic()
    find_checkpoint(file)
    print(json.dumps({**found, "again_ms": round(1e3 * (time.monotonic() - start), 2)}))


def resident_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def make_file(path: Path, shape: str, type_: Type) -> None:
    num_layers, hidden, inner, heads, is_tied = SHAPES[shape]
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in {
        "block_count": num_layers, "context_length": 40960, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": NUM_KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    add_vocabulary(writer)
    matrices = {"token_embd": (NUM_IDS, hidden)} | ({} if is_tied else {"output": (NUM_IDS, hidden)})
    vectors = {"output_norm": hidden}
    for layer in (f"blk.{number}." for number in range(num_layers)):
        vectors |= {layer + "attn_norm": hidden, layer + "ffn_norm": hidden}
        vectors |= {layer + "attn_q_norm": HEAD_DIM, layer + "attn_k_norm": HEAD_DIM}
        for name, size in (("attn_q", heads), ("attn_k", NUM_KV_HEADS), ("attn_v", NUM_KV_HEADS)):
            matrices[layer + name] = size * HEAD_DIM, hidden
        matrices[layer + "attn_output"] = hidden, heads * HEAD_DIM
        matrices |= {layer + "ffn_gate": (inner, hidden), layer + "ffn_up": (inner, hidden)}
        matrices[layer + "ffn_down"] = hidden, inner
    for name, size in vectors.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    rng = np.random.default_rng(0)
    for name, (outputs, inputs) in matrices.items():
        writer.add_tensor(f"{name}.weight", random_blocks(rng, outputs, inputs, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rng: np.random.Generator, outputs: int, inputs: int, type_: Type) -> np.ndarray:
    block, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = rng.integers(0, 256, (outputs, inputs // block, num_bytes), dtype=np.uint8)
    scales = np.full((*blocks.shape[:2], SCALES[type_] // 2), 2e-4, np.float16)
    blocks[..., : SCALES[type_]] = scales.view(np.uint8)
    return blocks.reshape(outputs, -1)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """As large as Qwen3's: all pairs of bytes and some of three, each merged from the shorter."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters]
    merges = (pairs + [(a + b, letters[0]) for a, b in pairs] + [(a + b, letters[1]) for a, b in pairs])[:151_000]
    tokens = letters + [a + b for a, b in merges]
    special = ["<|endoftext|>", *(f"<|{number}|>" for number in range(NUM_IDS - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + special)
    writer.add_token_types([1] * len(tokens) + [3] * len(special))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(len(tokens))


if __name__ == "__main__":
    main()
