"""What a GGUF file is unpacked to: the weights, config and tokenizer of the model it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tiny import make_tiny_tokenizer
from tests.workers.execute.model.checkpoint.gguf_files import (
    FAMILIES,
    TEMPLATE,
    TOKENS,
    Type,
    make_gguf,
    random_blocks,
    tensors_of,
)
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.find import find_checkpoint, read_config
from triptych.workers.execute.model.checkpoint.gguf import unpack
from triptych.workers.execute.model.checkpoint.gguf.splits import SPLITS
from triptych.workers.execute.model.embeddings import Embeddings, describe_embeddings
from triptych.workers.execute.model.tokenizer import load_tokenizer

TEXT = "the  hello thex 123<|im_end|></s> é"
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 16,
}  # a row is a block of 256
MAY_DIFFER = {  # names, numbers of no consequence, and lfm2's inner size, which is adjusted when a model is made
    "architectures", "_name_or_path", "initializer_range", "pad_token_id", "unk_token_id", "head_dim",
    "intermediate_size", "block_auto_adjust_ff_dim",
}  # fmt: skip
TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_transformers(file: Path, config: Any = None) -> dict[str, torch.Tensor]:
    """The weights as transformers itself reads them from the file."""
    load: Any = AutoModelForCausalLM.from_pretrained
    options = {} if config is None else {"config": config}
    model: Any = load(file.parent, gguf_file=file.name, dtype=torch.float32, **options)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert weights.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor.to(dtype))] == []


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_model_is_the_one_that_was_converted(architecture: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    model = make_gguf(file, architecture)
    folder = find_checkpoint(file, dtype="float32")
    weights, expected = loaded(folder), model.state_dict()
    for name in (name for name in expected if name.endswith("A_log")):
        torch.testing.assert_close(weights[name], expected[name])  # the file has its exponential
        weights[name] = expected[name]
    assert_equal(weights, expected, torch.float32)
    made, known = read_config(folder).to_dict(), model.config.to_dict()
    assert known.pop("rope_parameters").items() <= made["rope_parameters"].items()
    eps = "norm_eps" if architecture == "lfm2" else "rms_norm_eps"
    assert known.pop(eps) == pytest.approx(made[eps])  # a float32 in the file
    kept = known.keys() - MAY_DIFFER
    assert {key: made[key] for key in kept} == {key: known[key] for key in kept}


@pytest.mark.parametrize("type_", TYPES.values(), ids=TYPES)
def test_numbers_are_those_that_transformers_reads(type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    make_gguf(file, type_=type_)
    assert_equal(tensors_of(find_checkpoint(file)), by_transformers(file), torch.bfloat16)


@pytest.mark.parametrize("type_", [Type.Q4_K, Type.Q5_K], ids=lambda type_: str(type_.name))
def test_blocks_of_256_numbers_are_those_that_transformers_reads(type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    make_gguf(
        file,
        type_=type_,
        tensors=lambda arrays: {n: random_blocks(a.shape, type_) if a.ndim > 1 else a for n, a in arrays.items()},
        **WIDE,
    )
    assert_equal(tensors_of(find_checkpoint(file)), by_transformers(file), torch.bfloat16)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3moe", "qwen35"])
def test_quantised_families_are_those_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    make_gguf(file, architecture, type_=Type.Q8_0)
    folder = find_checkpoint(file)
    assert_equal(loaded(folder), by_transformers(file, AutoConfig.from_pretrained(folder)), torch.bfloat16)


def test_experts_are_stored_one_by_one_as_they_are_published(tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", "qwen3moe")
    names = tensors_of(find_checkpoint(tmp_path / "x.gguf"))
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names


def test_weights_are_spread_over_files_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "_SHARD_BYTES", 50_000)
    model = make_gguf(tmp_path / "x.gguf")
    folder = find_checkpoint(tmp_path / "x.gguf")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_equal(loaded(folder), model.state_dict(), torch.bfloat16)


def test_a_model_in_several_parts_is_one_model(tmp_path: Path) -> None:
    files = [tmp_path / f"x-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, file in enumerate(files):
        model = make_gguf(file, part=(number, 2))
    assert_equal(loaded(find_checkpoint(files[0])), model.state_dict(), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"name the first, x-00001-of-00002.gguf"):
        find_checkpoint(files[1])
    make_gguf(files[1], part=(1, 2), tensors=lambda arrays: dict(list(arrays.items())[:-2]))
    with pytest.raises(ConfigError, match=r"the parts of .* have \d+ tensors, they should have"):
        find_checkpoint(files[0])
    files[1].unlink()
    with pytest.raises(ConfigError, match=r"x-00002-of-00002.gguf is a part that is missing"):
        find_checkpoint(files[0])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_byte_level_tokenizer_gives_the_same_ids(architecture: str, tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", architecture)
    tokenizer = load_tokenizer(find_checkpoint(tmp_path / "x.gguf"))
    known = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    ids = tokenizer.encode(TEXT)
    assert ids[1:] == known.encode(TEXT, add_special_tokens=False)
    assert ids[:2] == [1, 260]  # <s>, "the"
    assert {2, 262} <= set(ids)  # special tokens are not cut into pieces
    assert tokenizer.decode(ids) == f"<s>{TEXT}"
    assert len(tokenizer) == len(TOKENS) + (architecture == "qwen2")  # whose class adds its own
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_a_sentencepiece_tokenizer_gives_the_same_ids(architecture: str, tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", architecture, pieces=True, vocab_size=275)
    tokenizer = load_tokenizer(find_checkpoint(tmp_path / "x.gguf"))
    known = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    ids = tokenizer.encode("the hello é")
    assert ids == [1, *known.encode("the hello é", add_special_tokens=False)]
    assert ids[-2:] == [198, 172]  # bytes of what has no piece
    if architecture != "gemma2":  # as Llama 2's own tokenizer; transformers' reader has one space too few
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" the")) == ["<s>", "▁", "▁the"]
    assert tokenizer.chat_template == TEMPLATE


def test_special_tokens_of_other_letters_than_bytes_have_are_not_cut(tmp_path: Path) -> None:
    tokens = [*TOKENS[:261], "<｜User｜>", "<think>", "  ", *TOKENS[264:]]
    settings = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 3 + [1] * 258 + [3, 4, 4] + [5] * 8}
    make_gguf(tmp_path / "x.gguf", settings=settings)
    tokenizer = load_tokenizer(find_checkpoint(tmp_path / "x.gguf"))
    assert tokenizer.encode("<｜User｜>the  <think>") == [1, 261, 260, 263, 262]
    assert tokenizer.decode([261, 260, 263, 262], skip_special_tokens=True) == "the  <think>"
    assert len(tokenizer) == len(tokens)


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("starcoder", r"don_'t_ _1_2_3_4_ Xx字_?!_ |"), ("glm4", r"don_'t_ _123_4_ Xx字_?!_ |"),
        ("stablelm2", r"don_'t_ _1_2_3_4_ Xx字_?!_ |"), ("deepseek-v3", r"don_'t_ _123_4_ Xx_字_?!_ |"),
        ("deepseek-llm", r"don_'_t_ _1_2_3_4_ Xx_字_?!_ _|"), ("falcon", r"don_'_t_ _123_4_ Xx字_?!_ |"),
        ("deepseek-coder", r"don_'_t_ _1_2_3_4_ Xx_字_?!_ _|"), ("bloom", r"don't_ 1234_ Xx字_?! |"),
        ("youtu", r"don't_ _1_2_3_4_ Xx_字_?!_ |"), ("seed-coder", r"don_'t_ _1_2_3_4_ Xx字_?!_ |"),
    ],
)  # fmt: skip
def test_texts_are_split_as_the_published_tokenizers_split_them(split: str, pieces: str) -> None:
    backend = json.loads(make_tiny_tokenizer().backend_tokenizer.to_str())
    backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": SPLITS[split]}
    splitter = Tokenizer.from_str(json.dumps(backend)).pre_tokenizer
    text = "don't 1234 Xx字?! \n"
    found = [text[slice(*place)] for _, place in splitter.pre_tokenize_str(text)]
    assert "_".join(found) == pieces.replace("|", "\n")


def test_smollm_cuts_numbers_into_digits(tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", settings={"tokenizer.ggml.pre": "smollm"})
    tokenizer = load_tokenizer(find_checkpoint(tmp_path / "x.gguf"))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("the 12")
    assert [piece for piece, _ in pieces] == ["the", "Ġ", "1", "2"]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_a_sentencepiece_tokenizer_without_a_first_space_adds_none(architecture: str, tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.add_space_prefix": False}
    make_gguf(tmp_path / "x.gguf", architecture, pieces=True, vocab_size=275, settings=settings)
    tokenizer = load_tokenizer(find_checkpoint(tmp_path / "x.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the the")) == ["<s>", "the", "▁the"]
    assert tokenizer.decode(tokenizer.encode(" the the")[1:]) == " the the"


@pytest.mark.parametrize(
    ("split", "stated", "begins"),
    [
        ("llama-bpe", None, True), ("smollm", None, False), ("gpt-2", True, True), ("llama-bpe", False, False),
    ],
)  # fmt: skip
def test_a_text_begins_as_llama_cpp_begins_it(split: str, stated: bool | None, begins: bool, tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.pre": split, "tokenizer.ggml.add_bos_token": stated}
    make_gguf(tmp_path / "x.gguf", settings=settings)
    ids = load_tokenizer(find_checkpoint(tmp_path / "x.gguf")).encode("the")
    assert ids == ([1, 260] if begins else [260])


def test_a_file_for_embeddings_of_the_last_token_makes_them(tmp_path: Path) -> None:
    """Such as those of Qwen3-Embedding, whose texts end with a token of their own."""
    settings = {"ARCH.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    make_gguf(tmp_path / "x.gguf", "qwen3", settings=settings)
    folder = find_checkpoint(tmp_path / "x.gguf")
    assert load_tokenizer(folder).encode("the")[-1] == 2
    assert describe_embeddings(folder) == Embeddings()


@pytest.mark.parametrize(("split", "ids"), [("llama-bpe", [260]), ("gpt-2", [86, 259])])
def test_a_word_of_llama_3_that_is_a_token_needs_no_merges(split: str, ids: list[int], tmp_path: Path) -> None:
    settings = {
        "tokenizer.ggml.pre": split, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.tokens": [*TOKENS[:259], "he", *TOKENS[260:]],
    }  # fmt: skip
    make_gguf(tmp_path / "x.gguf", settings=settings)
    assert load_tokenizer(find_checkpoint(tmp_path / "x.gguf")).encode("the") == ids


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [2, 262]),  # what llama.cpp knows by its name
        ({"tokenizer.ggml.eot_token_id": 260}, [2, 260, 262]),
        ({"tokenizer.ggml.eos_token_id": 262}, [262]),
        ({"tokenizer.ggml.tokens": [*TOKENS[:261], "<|end|>", *TOKENS[262:]]}, [2, 261, 262]),
        (
            {"tokenizer.ggml.tokens": ["<|return|>", "<|call|>", *TOKENS[2:261], "<|end|>", *TOKENS[262:]]},
            [0, 1, 2, 262],
        ),
    ],
)
def test_an_answer_ends_where_llama_cpp_ends_it(settings: dict[str, Any], ends: list[int], tmp_path: Path) -> None:
    make_gguf(tmp_path / "x.gguf", settings=settings)
    folder = find_checkpoint(tmp_path / "x.gguf")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
