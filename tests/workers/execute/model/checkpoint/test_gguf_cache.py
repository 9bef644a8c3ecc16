"""A GGUF file is unpacked once, whole or not at all; what cannot be unpacked is refused by name."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.workers.execute.model.checkpoint.gguf_files import Arrays, Type, make_gguf, tensors_of
from triptych.protocol.config import ModelConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.loading import find_folders
from triptych.workers.execute.model.checkpoint.find import find_checkpoint, weight_files
from triptych.workers.execute.model.checkpoint.gguf import cache, unpack
from triptych.workers.execute.model.checkpoint.gguf.file import open_gguf


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where unpacked files are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triptych" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make_gguf(tmp_path / "x.gguf", type_=Type.Q8_0)
    return tmp_path / "x.gguf"


def made(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.suffix != ".lock"]


def test_later_starts_find_it_without_the_package(file: Path) -> None:
    first = find_checkpoint(file)
    code = f"""
import sys
sys.modules["gguf"] = None
from triptych.protocol.config import ModelConfig
from triptych.workers.execute.loading import find_folders
print(find_folders(ModelConfig(model={str(file)!r}))[0], "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{first} False\n"


def test_progress_is_told_tensor_by_tensor(file: Path) -> None:
    told: list[tuple[int, int]] = []
    find_folders(ModelConfig(model=str(file)), lambda done, total: told.append((done, total)))
    assert told == [(number, 30) for number in range(1, 31)]


def test_a_changed_file_is_unpacked_anew_in_place_of_the_earlier(file: Path, folder: Path) -> None:
    first = find_checkpoint(file)
    make_gguf(file, type_=Type.F16)
    os.utime(file, (1, 1))
    second = find_checkpoint(file)
    assert made(folder) == [second]
    assert second != first


def test_other_weights_of_the_same_size_and_time_are_unpacked(file: Path) -> None:
    """As from an image that gives all files one time; the weights of the earlier file were served."""
    os.utime(file, (1, 1))
    first = tensors_of(find_checkpoint(file))["model.norm.weight"]
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[:half] + bytes(byte ^ 1 for byte in content[half:]))
    os.utime(file, (1, 1))
    assert not tensors_of(find_checkpoint(file))["model.norm.weight"].equal(first)


def test_each_type_of_weights_has_its_own(file: Path, folder: Path) -> None:
    names = [find_checkpoint(file, dtype=dtype) for dtype in ("auto", "bfloat16", "float32", "float16")]
    assert names[0] == names[1]
    assert sorted(made(folder)) == sorted(set(names))
    assert {str(tensor.dtype) for tensor in tensors_of(names[2]).values()} == {"torch.float32"}


def test_a_kill_in_the_middle_leaves_nothing_that_is_found(file: Path, folder: Path) -> None:
    def kill_at_five(done: int, total: int) -> None:
        if done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        try:
            find_checkpoint(file, progress=kill_at_five)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [entry.name[:9] for entry in made(folder)] == ["making-x-"]
    whole = find_checkpoint(file)
    assert made(folder) == [whole]


def test_two_starts_at_once_unpack_it_once(file: Path, folder: Path) -> None:
    told: list[int] = []
    with ThreadPoolExecutor(2) as starts:  # the lock is one of opened files, so threads are as good as processes
        found = list(starts.map(lambda _: find_checkpoint(file, progress=lambda done, _: told.append(done)), range(2)))
    assert found == made(folder) * 2
    assert told == list(range(1, 31))


def test_a_file_that_changes_meanwhile_is_not_kept(file: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"x.gguf was changed while it was unpacked"):
        find_checkpoint(file, progress=lambda done, total: os.utime(file, (done, done)))
    assert made(folder) == []


def test_only_the_last_used_are_kept(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_NUM_KEPT", 1)
    for name in ("a", "b"):
        make_gguf(tmp_path / f"{name}.gguf")
        last = find_checkpoint(tmp_path / f"{name}.gguf")
        os.utime(last, (1, 1))
    assert made(folder) == [last]


def test_a_full_disk_is_told_of_before_it_is_full(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_300_000_000))
    monkeypatch.setattr(unpack, "_MARGIN_BYTES", 2_000_000_000)
    with pytest.raises(ConfigError, match=rf"takes 2.0 GB, and {folder} has 1.3 GB free"):
        find_checkpoint(file)
    assert made(folder) == []


def test_a_disk_that_fails_is_told_of(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unpack, "save_file", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        find_checkpoint(file)
    assert made(folder) == []


def test_a_cache_that_cannot_be_written_is_told_of(file: Path, folder: Path) -> None:
    folder.parents[1].write_text("a file")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        find_checkpoint(file)


def test_a_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'triptych\[gguf\]'"):
        find_checkpoint(file)


def test_a_missing_file_is_named_without_torch() -> None:
    with pytest.raises(ConfigError, match=r"GGUF file /no/such/model.gguf does not exist"):
        find_checkpoint("/no/such/model.gguf")


def test_a_folder_with_gguf_files_only_says_what_to_do(file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"to serve x.gguf, name the file instead of its directory"):
        weight_files(tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def cut_settings(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:500])


def garble(file: Path) -> None:
    random = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    file.write_bytes(file.read_bytes()[:24] + random + file.read_bytes()[1024:])


def lengthen_a_list(file: Path) -> None:
    """A list of numbers: its type, that of its items, and how many."""
    content, key = file.read_bytes(), b"tokenizer.ggml.token_type"
    at = content.index(key) + len(key) + 8
    file.write_bytes(content[:at] + struct.pack("<Q", 1 << 60) + content[at + 8 :])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, ""),
        (lengthen_a_list, r"its lists have \d+ items"),
        (cut_settings, ""),
        (garble, ""),
        (lambda file: file.write_bytes(b""), ""),
        (lambda file: file.write_text("<html>"), ""),
    ],
    ids=["cut", "long list", "cut settings", "garbled", "empty", "another"],
)
def test_a_damaged_file_is_refused(damage: Callable[[Path], object], reason: str, file: Path, folder: Path) -> None:
    damage(file)
    with pytest.raises(ConfigError, match=rf"x.gguf is no GGUF file, or is damaged, .*{reason}") as raised:
        find_checkpoint(file)
    assert raised.value.param == "model"
    assert made(folder) == []


def test_no_list_is_read_that_is_longer_than_any_vocabulary(file: Path) -> None:
    """Each of its items would take a hundred times as much memory as the file has for it."""
    lengthen_a_list(file)
    with pytest.raises(ConfigError, match=r"its lists have \d{19} items, the limit is 4194304"):
        open_gguf([file])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"general.type": "mmproj"}, r"is a projector for images or audio \(mmproj\), not a model"),
        ({"general.type": "adapter"}, r"is an adapter \(adapter\), not a model"),
        ({"general.architecture": "starcoder"}, "is of architecture 'starcoder', known are: apertus, arcee, bloom"),
        ({"general.architecture": "clip"}, "is a projector"),
        ({"general.architecture": "nomic-bert"}, r"is a model \(nomic-bert\) for embeddings"),
        ({"general.architecture": "llada-moe"}, r"is a model \(llada-moe\) for texts that are written in no order"),
        ({"ARCH.pooling_type": 1}, r"is a model \(llama\) with .* embeddings not of the last token"),
        ({"ARCH.pooling_type": 4}, r"is a model \(llama\) with .* for ranking"),
        ({"ARCH.attention.causal": False}, r"is a model \(llama\) with attention in both directions"),
        ({"tokenizer.ggml.model": "bert"}, "has a tokenizer of kind 'bert', known are: gpt2, llama"),
        ({"tokenizer.ggml.merges": None}, "does not state tokenizer.ggml.merges"),
        ({"tokenizer.ggml.pre": "poro-chat"}, "splits texts in the way 'poro-chat', known are: .*llama-bpe"),
    ],
)
def test_what_is_not_supported_is_named(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", settings=settings)
    with pytest.raises(ConfigError, match=reason) as raised:
        find_checkpoint(tmp_path / "x.gguf")
    assert raised.value.param == "model"


def test_a_split_that_its_family_does_not_have_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", "qwen2", settings={"tokenizer.ggml.pre": "llama-bpe"})
    with pytest.raises(ConfigError, match="splits texts in the way 'llama-bpe', which is not that of qwen2"):
        find_checkpoint(tmp_path / "x.gguf")


def test_a_type_without_numbers_is_named(tmp_path: Path) -> None:
    def as_integers(arrays: Arrays) -> Arrays:
        return {n: a.astype(np.int8) if n == "blk.0.ffn_up.weight" else a for n, a in arrays.items()}

    make_gguf(tmp_path / "x.gguf", tensors=as_integers)
    with pytest.raises(ConfigError, match=r"blk.0.ffn_up.weight in .* is of type I8, known are: BF16, F16, F32, IQ"):
        find_checkpoint(tmp_path / "x.gguf")


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", tensors=lambda arrays: {**arrays, "blk.0.attn_q.bias": np.zeros(64, np.float32)})
    with pytest.raises(ConfigError, match=r"blk.0.attn_q.bias in .* has no place in LlamaForCausalLM"):
        find_checkpoint(tmp_path / "x.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def without_one(arrays: Arrays) -> Arrays:
        return {name: array for name, array in arrays.items() if name != "blk.1.ffn_up.weight"}

    make_gguf(tmp_path / "x.gguf", tensors=without_one)
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights, 'model.layers.1.mlp.up_proj.weight' first"):
        find_checkpoint(tmp_path / "x.gguf")


def test_errors_of_a_draft_model_say_so(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "y.gguf")
    cut(tmp_path / "y.gguf")
    with pytest.raises(ConfigError, match=r"the draft model: .*y.gguf is no GGUF file") as raised:
        find_folders(ModelConfig(model=str(file), draft_model=str(tmp_path / "y.gguf")))
    assert raised.value.param == "draft_model"
