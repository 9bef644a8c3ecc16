"""A second start of a checkpoint needs neither transformers nor the self-test, and gives the same answers."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import make_adapter
from tests.workers.execute.model.native.decoders import make_checkpoint
from tests.workers.execute.model.native.families import FAMILIES
from triptych.launch.terminal.report import model_line
from triptych.protocol.config import CacheConfig, ModelConfig, PipelineConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.protocol.plain import make
from triptych.protocol.tokenizer_files import FACTS_FILE, TOKENIZER_FILE, TokenizerFacts, save_tokenizer
from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.model import backends
from triptych.workers.execute.model.build import build_runner, rehearse, spare_cache
from triptych.workers.execute.model.checkpoint.find import read_config
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.guard import proof
from triptych.workers.execute.model.guard.proof import ProofStore, digest_of
from triptych.workers.execute.model.native import proven as native_proof
from triptych.workers.execute.model.native.self_test import check_native
from triptych.workers.execute.model.spec.decoder import DecoderSpec
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes

Start = Callable[[str], ModelCard]


@pytest.fixture(name="checkpoint", scope="module")
def fixture_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"), rope_parameters=scaling)


@pytest.fixture(name="start")
def fixture_start(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Loads the checkpoint into a run directory of that name; no proof exists before."""

    def places(name: str, spare: Path | None) -> list[Path]:
        return [tmp_path / "cache" / name, *([] if spare is None else [spare / name])]

    monkeypatch.setattr(proof, "places", places)  # except for the kernels, which take seconds

    def start(name: str, **model: Any) -> ModelCard:
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        _, card = build_runner(
            ModelConfig(model=str(checkpoint), device="cpu", threads=1, **model),
            CacheConfig(num_pages=64),
            SchedulerConfig(),
            model_dir=checkpoint,
            run_dir=run_dir,
        )
        return card

    return start


@pytest.fixture(name="proofs")
def fixture_proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every self-test."""
    run: list[str] = []
    check = check_native

    def counted(*arguments: object, **options: object) -> float:
        run.append("self-test")
        return check(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(native_proof, "check_native", counted)
    return run


def test_second_start_runs_no_self_test_and_has_the_same_card(start: Start, proofs: list[str], tmp_path: Path) -> None:
    cards = [start("first"), start("second")]
    assert proofs == ["self-test"]
    assert cards[0].to_wire() | {"load_s": 0} == cards[1].to_wire() | {"load_s": 0}
    for name in (TOKENIZER_FILE, FACTS_FILE):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize("has_room", [True, False])
def test_attempt_without_enough_memory_is_proven_once_there_is_enough(
    has_room: bool, start: Start, proofs: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig(model=ModelConfig(model=str(checkpoint), device="cpu", threads=1))
    with monkeypatch.context() as patch:
        patch.setattr(backends, "available_bytes", lambda device: (1 << 40) * has_room)
        rehearse(config, folder=checkpoint, run_dir=tmp_path)
        rehearse(config, folder=checkpoint, run_dir=tmp_path)
    assert len(proofs) == has_room
    start("first")
    assert proofs == ["self-test"]


def test_stored_proof_equals_the_computed_one(start: Start, checkpoint: Path, tmp_path: Path) -> None:
    start("first")
    (tmp_path / "other").mkdir()
    kept = ProofStore(checkpoint, ModelConfig(threads=1)).find(tmp_path / "other")
    assert kept is not None
    config = read_config(checkpoint)
    for kept_rope, rope in zip(kept.ropes, find_ropes(config), strict=True):
        assert all((a == b).all() for a, b in zip(kept_rope.tables(200), rope.tables(200), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_description_is_read_as_it_was_written(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    spec = describe_decoder(read_config(checkpoint), open_tensors(checkpoint).shapes())
    written = json.loads(json.dumps(dataclasses.asdict(spec)))
    assert make(DecoderSpec, written, "spec") == spec
    for field in written:  # of an older version without this field
        with pytest.raises(ConfigError, match=f"spec has no {field}"):
            make(DecoderSpec, {name: value for name, value in written.items() if name != field}, "spec")


@pytest.mark.parametrize("change", ["dtype", "config", "weights"])
def test_changed_checkpoint_or_setting_is_proven_again(
    change: str, start: Start, proofs: list[str], checkpoint: Path
) -> None:
    start("first")
    if change == "dtype":
        start("second", dtype="bfloat16")  # type: ignore[call-arg]
    else:
        file = checkpoint / ("config.json" if change == "config" else "model.safetensors")
        if change == "config":
            file.write_text(file.read_text() + "\n")
        else:
            file.write_bytes(file.read_bytes())
        start("second")
    assert len(proofs) == 2


def test_checkpoint_with_other_weights_of_the_same_size_and_time_is_another(checkpoint: Path, tmp_path: Path) -> None:
    """As from an image that gives all files one time: pages of the earlier weights must not be used."""
    digests = set()
    for name in ("a", "b"):
        folder = shutil.copytree(checkpoint, tmp_path / name)
        weights = folder / "model.safetensors"
        if name == "b":
            content = weights.read_bytes()
            weights.write_bytes(content[:-5000] + bytes(byte ^ 1 for byte in content[-5000:]))
        os.utime(weights, (1, 1))
        digests.add(digest_of(folder))
    assert len(digests) == 2


def test_large_files_beside_the_weights_are_not_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an optimizer's state in the directory of a training run, which is larger than the weights."""
    shutil.copytree(checkpoint, tmp_path / "run")
    large = tmp_path / "run" / "optimizer.pt"
    read: list[str] = []
    folders: list[Path] = []

    def read_bytes(file: Path) -> bytes:
        read.append(file.name)
        return file.open("rb").read()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    for size in (1, 1 << 20):
        large.touch()
        os.truncate(large, (64 << 20) + size)
        folders.append(ProofStore(tmp_path / "run", ModelConfig()).folders[0])
    assert "config.json" in read
    assert large.name not in read
    assert folders[0] != folders[1]


def test_adapter_is_proven_with_its_model_until_it_changes(
    start: Start, proofs: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    modules = (f"a={make_adapter(tmp_path / 'a', checkpoint)}",)
    for name in ("first", "second"):
        start(name, lora_modules=modules)  # type: ignore[call-arg]
    assert len(proofs) == 1
    make_adapter(tmp_path / "a", checkpoint, rank=3)
    start("third", lora_modules=modules)  # type: ignore[call-arg]
    start("without")
    assert len(proofs) == 3


@pytest.mark.parametrize("damage", ["{", "{}", '{"spec": {"vocab_size": "many"}}'])
def test_damaged_proof_is_computed_again(damage: str, start: Start, proofs: list[str], tmp_path: Path) -> None:
    start("first")
    [file] = (tmp_path / "cache").rglob("proof.json")
    file.write_text(damage)
    start("second")
    start("third")
    assert len(proofs) == 2


def test_without_a_cache_each_pipeline_runs_its_own_self_test(
    start: Start, proofs: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no folder")
    for name in ("first", "first", "second"):
        assert start(name).backend.startswith("native")
    config = PipelineConfig(model=ModelConfig(model=str(checkpoint), device="cpu", threads=1))
    (tmp_path / "second" / "rehearsal").mkdir()
    spare = spare_cache(tmp_path / "second")
    rehearse(config, folder=checkpoint, run_dir=tmp_path / "second" / "rehearsal", spare=spare)
    assert len(proofs) == 2


def test_restart_does_not_unpack_the_tokenizer_that_is_served(
    start: Start, proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one takes a third of a restart that finds its weights."""
    start("first")
    monkeypatch.setattr(proof, "load_tokenizer_json", lambda _: pytest.fail("it is unpacked"))
    start("first")
    assert len(proofs) == 1


def test_tokenizer_different_from_the_served_one_is_refused(start: Start, checkpoint: Path, tmp_path: Path) -> None:
    start("first")
    (tmp_path / "served").mkdir()
    facts = TokenizerFacts(vocab_size=1, chat_template=None, special_tokens={}, bos_token_id=None)
    save_tokenizer(tmp_path / "served", "{}", facts)
    with pytest.raises(ConfigError, match="another tokenizer"):
        ProofStore(checkpoint, ModelConfig(threads=1)).find(tmp_path / "served")


def test_proven_decoder_starts_without_importing_transformers() -> None:
    imports = ", ".join(f"triptych.workers.execute.model.{name}" for name in ("build", "fused.build", "device.runner"))
    code = f"import sys; import {imports}; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_kernels_of_another_level_or_compiler_are_proven_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(model=str(checkpoint))
    before = ProofStore(checkpoint, config).folders[0]
    assert ProofStore(checkpoint, dataclasses.replace(config, kernels="portable")).folders[0] != before
    monkeypatch.setattr(compiling, "_version", lambda compiler: "another version")
    assert ProofStore(checkpoint, config).folders[0] != before


def test_without_a_compiler_the_card_mentions_the_cost(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    card = start("slow")
    assert card.backend.startswith("transformers")
    assert "3 to 10 times as long" in card.why_slow
    assert "no C++ compiler" in card.why_slow
    assert card.why_slow in model_line(card.to_wire())
