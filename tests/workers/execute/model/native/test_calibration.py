"""Four-bit weights are rounded by the sizes of their inputs, in the same way at every start."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.adapters import make_adapter
from tests.workers.execute.kernels.levels import FASTEST, load_cached
from tests.workers.execute.model.native.decoders import (
    PLAINLY,
    NativeEngine,
    change_config,
    changed_tensors,
    in_four_bits,
    make_checkpoint,
    pack,
)
from triptych.protocol.arrays import Float32, Int32
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.facts import Progress, no_progress
from triptych.workers.execute.model.native import build, calibration, calibration_store
from triptych.workers.execute.model.native.build import NativeSetting
from triptych.workers.execute.model.native.calibration import NUM_STEPS, Importance, calibrate
from triptych.workers.execute.model.native.calibration_store import CalibrationStore
from triptych.workers.execute.model.native.weights import PackedWeights
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes
from triptych.workers.execute.step import StepInputs

FOUND = {"a": np.arange(1, 4, dtype=np.float32), "b": np.ones(2, np.float32)}


def observed(
    checkpoint: Path, num_threads: int = 1, progress: Progress = no_progress
) -> tuple[PackedWeights, Importance]:
    """The weights after a calibration, and what it found."""
    weights = pack(checkpoint, FASTEST, Format.INT4, calibration_steps=NUM_STEPS)
    ropes = find_ropes(AutoConfig.from_pretrained(checkpoint))
    return weights, calibrate(load_cached(FASTEST), weights, ropes, num_threads=num_threads, progress=progress)


def calibrated(checkpoint: Path, num_threads: int = 1, progress: Progress = no_progress) -> Importance:
    return observed(checkpoint, num_threads, progress)[1]


@pytest.fixture(name="written")
def fixture_written(monkeypatch: pytest.MonkeyPatch) -> list[Int32]:
    """The tokens [sequences] of each step of a calibration."""
    written, step = list[Int32](), calibration._step

    def noted(tokens: Int32, position: int, **pages: int) -> StepInputs:
        written.append(tokens)
        return step(tokens, position, **pages)

    monkeypatch.setattr(calibration, "_step", noted)
    return written


def inputs_in_transformers(checkpoint: Path, written: list[Int32]) -> dict[str, torch.Tensor]:
    """Inputs [tokens, channels] of linear modules, and of a layer's experts, for these tokens."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **PLAINLY)
    found: dict[str, torch.Tensor] = {}

    def note(name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found[f"{name}.weight"] = inputs[0].flatten(0, -2)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith("mlp.experts"):
            module.register_forward_pre_hook(partial(note, name))
    with torch.inference_mode():
        model(torch.from_numpy(np.stack(written, axis=1).astype(np.int64)))
    return found


def squares_of(inputs: torch.Tensor) -> Float32:
    return inputs.square().sum(0).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "lfm2", "deepseek_v3", "bamba"])
def test_sizes_are_those_of_the_inputs_of_transformers(family: str, tmp_path: Path, written: list[Int32]) -> None:
    """Of the tokens that the model wrote; its weights are exact in four bits."""
    checkpoint = in_four_bits(make_checkpoint(family, tmp_path))
    found = calibrated(checkpoint)
    expected = inputs_in_transformers(checkpoint, written)
    assert np.stack(written).shape == (NUM_STEPS, 16)
    common = found.keys() & expected.keys()
    assert len(common) >= 4
    for name in common:
        exact = squares_of(expected[name])
        assert np.corrcoef(found[name], exact / exact.mean())[0, 1] > 0.98, name
        assert found[name].mean() == pytest.approx(1, rel=1e-3)


def test_sizes_inside_of_experts_are_those_of_their_own_tokens(tmp_path: Path, written: list[Int32]) -> None:
    """If all experts are alike, together they compute what one of them would, for as many tokens as were routed."""
    checkpoint = in_four_bits(make_checkpoint("qwen3_moe", tmp_path))
    with changed_tensors(checkpoint) as tensors:
        for name in tensors:
            tensors[name] = tensors[re.sub(r"experts\.\d+", "experts.0", name)].clone()
        gate, up = (tensors[f"model.layers.0.mlp.experts.0.{which}_proj.weight"] for which in ("gate", "up"))
    weights, _ = observed(checkpoint)
    names, num_choices = weights.spec.layer(0).experts, weights.spec.experts_per_token
    x = inputs_in_transformers(checkpoint, written)["model.layers.0.mlp.experts.weight"]
    gated = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    for expected, of_experts in (
        (x, [weights.squares[expert.gate_up[0]] for expert in names]),
        (gated, [weights.squares[expert.down] for expert in names]),
    ):
        assert sum(of_experts) == pytest.approx(num_choices * squares_of(expected), rel=0.2)
        assert len({of.tobytes() for of in of_experts}) > 1


def test_experts_share_what_they_read_and_each_has_its_own_inside(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path)
    found, experts = calibrated(checkpoint), pack(checkpoint, FASTEST, Format.INT4).spec.layer(0).experts
    first, *others = [found[expert.gate_up[0]] for expert in experts]
    assert all(np.array_equal(first, other) for other in others)
    downs = [found[expert.down] for expert in experts]
    assert len({down.tobytes() for down in downs}) == len(downs)


def test_expert_without_tokens_rounds_all_inputs_alike(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path)
    spec = pack(checkpoint, FASTEST, Format.INT4).spec
    used, unused = (expert.down for expert in spec.layer(0).experts[:2])
    squares = {used: np.array([1, 3], np.float32), unused: np.zeros(2, np.float32)}
    found = calibration._importance(spec, squares, num_rows=8)
    assert found[unused].tolist() == [1, 1]
    assert 0.5 < found[used][0] < 1 < found[used][1] < 1.5


def test_inputs_that_are_not_numbers_are_not_known(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    with changed_tensors(checkpoint) as tensors:
        tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    found = calibrated(checkpoint)
    assert "model.layers.0.mlp.down_proj.weight" in found
    assert "model.layers.2.mlp.down_proj.weight" not in found


def test_threads_change_no_bit(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path)
    alone, together = calibrated(checkpoint, 1), calibrated(checkpoint, 3)
    assert alone.keys() == together.keys()
    assert all(np.array_equal(alone[name], together[name]) for name in alone)


def test_model_with_few_positions_writes_less(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gpt2", tmp_path, max_position_embeddings=24)
    steps: list[tuple[int, int]] = []
    assert calibrated(checkpoint, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(step, 24) for step in range(1, 25)]


@pytest.fixture(name="store")
def fixture_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationStore:
    """Whose cache is in ``tmp_path``."""

    def places(name: str, spare: Path | None) -> list[Path]:
        return [tmp_path / "cache" / name, *([] if spare is None else [spare / name])]

    monkeypatch.setattr(calibration_store, "places", places)
    return CalibrationStore(make_checkpoint("llama", tmp_path / "model"), FASTEST, tmp_path / "spare")


def test_what_is_kept_is_found(store: CalibrationStore) -> None:
    assert store.find() is None
    store.keep(FOUND)
    found = CalibrationStore(store.checkpoint, FASTEST).find()
    assert found is not None
    assert {name: values.tolist() for name, values in found.items()} == {"a": [1, 2, 3], "b": [1, 1]}


def test_changed_checkpoint_has_none(store: CalibrationStore) -> None:
    store.keep(FOUND)
    change_config(store.checkpoint, rms_norm_eps=0.5)
    assert CalibrationStore(store.checkpoint, FASTEST).find() is None


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "of another model"])
def test_damaged_file_is_made_again(damage: str, store: CalibrationStore, caplog: pytest.LogCaptureFixture) -> None:
    store.keep(FOUND)
    file = store._files[0]
    content = file.read_bytes()
    others = {
        "cut": content[:-1],
        "changed": content[:-1] + b"\0",
        "empty": b"",
        "of another model": CalibrationStore(store.checkpoint, "portable")._sealed(b""),
    }
    file.write_bytes(others[damage])
    assert store.find() is None
    assert "is damaged and is made again" in caplog.text
    store.keep(FOUND)
    assert store.find() is not None


def test_run_directory_takes_what_the_cache_cannot(store: CalibrationStore, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    store.keep(FOUND)
    assert store.find() is not None
    assert store.spare_cache is not None
    assert [file.parent.parent for file in (tmp_path / "spare").glob("*/*")] == [store.spare_cache]


def test_without_room_the_next_start_calibrates(store: CalibrationStore, tmp_path: Path) -> None:
    for name in ("cache", "spare"):
        (tmp_path / name).write_text("no folder")
    store.keep(FOUND)
    assert store.find() is None


def test_what_a_killed_start_left_does_not_stay(store: CalibrationStore) -> None:
    if (child := os.fork()) == 0:
        os.rename = lambda *_, **__: os._exit(9)
        try:
            store.keep(FOUND)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    [file, _] = store._files
    assert list(file.parent.iterdir()) != []
    store.keep(FOUND)
    assert list(file.parent.iterdir()) == [file]


class Starts:
    """Starts of a checkpoint with the cache of ``store``; all the weights that they packed."""

    def __init__(self, checkpoint: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.run_dir, self.num_calibrations = checkpoint, run_dir, 0
        monkeypatch.setattr(build, "calibrate", self._calibrate)
        monkeypatch.setattr(build, "PackedWeights", self._pack)

    def _calibrate(self, *arguments: object, **options: object) -> Importance:
        self.num_calibrations += 1
        return calibrate(*arguments, **options)  # type: ignore[arg-type]

    def _pack(self, *arguments: object, **options: object) -> PackedWeights:
        self._latest = PackedWeights(*arguments, **options)  # type: ignore[arg-type]
        return self._latest

    def start(self, name: str, **model: object) -> dict[str, Float32]:
        """The values of the weights."""
        (self.run_dir / name).mkdir(parents=True)
        NativeEngine(self.checkpoint, self.run_dir / name, **{"quantization": "int4", **model})  # type: ignore[arg-type]
        return {name: unpack().numpy() for name, unpack in self._latest.quantised().items()}


@pytest.fixture(name="starts")
def fixture_starts(store: CalibrationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(store.checkpoint, tmp_path / "runs", monkeypatch)


def test_only_the_first_start_calibrates_and_all_have_the_same_weights(starts: Starts, store: CalibrationStore) -> None:
    first = starts.start("first", dtype="float32", threads=2)
    second = starts.start("second", dtype="bfloat16", threads=1)
    assert starts.num_calibrations == 1
    assert all(np.array_equal(first[name], second[name]) for name in first)
    for file in store._files:
        file.unlink(missing_ok=True)
    third = starts.start("third")
    assert starts.num_calibrations == 2
    assert all(np.array_equal(first[name], third[name]) for name in first)


def test_adapters_and_eight_bit_pages_change_no_weight(starts: Starts, tmp_path: Path) -> None:
    first = starts.start("first")
    adapter = make_adapter(tmp_path / "adapter", starts.checkpoint)
    second = starts.start("second", lora_modules=(f"a={adapter}",), kv_dtype="int8")
    assert starts.num_calibrations == 1
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_rounding_differs_from_one_in_which_all_inputs_are_alike(starts: Starts) -> None:
    found, plain = starts.start("first"), pack(starts.checkpoint, FASTEST, Format.INT4).quantised()
    assert not any(np.array_equal(found[name], plain[name]().numpy()) for name in found)


@pytest.mark.parametrize(("size", "quantization"), [(32, "int4"), (None, "int8"), (None, "none")])
def test_weights_that_are_not_rounded_to_four_bits_need_no_calibration(
    size: int | None, quantization: str, starts: Starts
) -> None:
    if size:
        in_four_bits(starts.checkpoint, size)
    starts.start("first", quantization=quantization)
    assert starts.num_calibrations == 0


def test_progress_is_that_of_all_parts_of_a_first_start(store: CalibrationStore) -> None:
    tensors, config = open_tensors(store.checkpoint), AutoConfig.from_pretrained(store.checkpoint)
    spec, steps = describe_decoder(config, tensors.shapes()), list[tuple[int, int]]()
    setting = NativeSetting(
        quantization="int4", page_size=16, threads=1, progress=lambda done, total: steps.append((done, total))
    )
    for num_units in (2 * len(spec.tensors()) + NUM_STEPS, len(spec.tensors())):
        setting.pack(store.checkpoint, tensors, spec, find_ropes(config), torch.bfloat16)
        assert steps == [(done, num_units) for done in range(1, num_units + 1)]
        steps.clear()
