"""The tokenizer, chat template and end tokens of a GGUF file."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from .....protocol.errors import ConfigError
from ..hub import first_line
from ..tokenizer import load_tokenizer
from .file import GgufFile

logger = logging.getLogger(__name__)

_KINDS = ("gpt2", "llama")  # byte-level BPE, SentencePiece's BPE
# How texts are split before the merges: what transformers knows by name, and what its default for the others is
# right for.
_AS_GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
_SMOLLM = "smollm"  # as for GPT-2, after each digit was cut off
# Vocabularies of Llama 3's kind: a word that is a token is not made of others, and a text begins with <bos>, both
# whether the file says so or not.
_OF_LLAMA3 = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
}  # fmt: skip
_SPECIAL = ("bos", "eos", "unk", "pad")
_ENDS = ("eos", "eot", "eom")  # settings with the id of a token that ends an answer
# Tokens that end an answer wherever they exist: llama.cpp knows them by name too.
_NAMES_OF_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
_NORMAL = 1  # token type


def write_tokenizer_files(file: GgufFile, source: Path, name: str, target: Path) -> None:
    """Write the tokenizer and chat template of ``file``, which is in ``source`` under this name, to ``target``, where
    its config is already.

    Raises:
        ConfigError: its tokenizer is of a kind that is not supported.
    """
    _check_kind(file)
    try:
        # Not by the class of the family, which would have a say in how texts are split.
        read: Any = PreTrainedTokenizerFast.from_pretrained(source, gguf_file=name, local_files_only=True)
        backend = json.loads(read.backend_tokenizer.to_str())
    except Exception as error:  # the libraries raise anything from KeyError to bare Exception
        raise ConfigError(f"cannot read the tokenizer in {file.path}: {first_line(error)}", param="model") from error
    _complete(backend, file)
    special = {f"{kind}_token": getattr(read, f"{kind}_token") for kind in _SPECIAL}
    template = file.value("tokenizer.chat_template")
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        add_bos_token=_adds_bos(file),
        add_eos_token=bool(file.value("tokenizer.ggml.add_eos_token")),
        **{name: token for name, token in special.items() if token is not None},
    )
    tokenizer.save_pretrained(target)
    split = json.loads(load_tokenizer(target).backend_tokenizer.to_str())["pre_tokenizer"]
    if split != backend["pre_tokenizer"]:  # for some families transformers decides, whatever the files say
        how = file.value("tokenizer.ggml.pre")
        text = f"{file.path} splits texts in the way {how!r}, which is not that of {file.architecture}"
        raise ConfigError(text, param="model")


def write_generation_config(file: GgufFile, target: Path) -> None:
    """Write which tokens begin and end an answer."""
    ends = {file.value(f"tokenizer.ggml.{kind}_token_id") for kind in _ENDS}
    tokens, types = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type") or []
    pairs = zip(tokens, types, strict=False)
    special = {token: number for number, (token, type_) in enumerate(pairs) if type_ != _NORMAL}
    ends |= {special.get(name) for name in _NAMES_OF_ENDS}
    config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=file.value("tokenizer.ggml.bos_token_id"),
        eos_token_id=sorted(end for end in ends if end is not None) or None,
        pad_token_id=file.value("tokenizer.ggml.padding_token_id"),
    )
    config.save_pretrained(target)


def _check_kind(file: GgufFile) -> None:
    kind, split = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre")
    known_splits = {*_AS_GPT2, *_known_splits(), _SMOLLM}
    if kind not in _KINDS or not file.value("tokenizer.ggml.tokens"):
        known = ", ".join(_KINDS)
        raise ConfigError(f"{file.path} has a tokenizer of kind {kind!r}, known are: {known}", param="model")
    if kind != "gpt2":
        return
    if not file.value("tokenizer.ggml.merges"):
        raise ConfigError(f"{file.path} does not state tokenizer.ggml.merges", param="model")
    if split in (None, "default"):
        logger.warning("%s does not say how texts are split before tokens are found: as for GPT-2, then", file.path)
    elif split not in known_splits:
        known = ", ".join(sorted(known_splits))
        raise ConfigError(f"{file.path} splits texts in the way {split!r}, known are: {known}", param="model")


def _known_splits() -> set[str]:
    """The ways to split texts that this version of transformers knows. Before it knew any, it took them from the
    architecture, which is often wrong.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        text = f"GGUF files need transformers 5.20, {version('transformers')} is installed"
        raise ConfigError(text, param="model") from error
    return set(GGUF_PRE_TOKENIZER_SPLITS)


def _adds_bos(file: GgufFile) -> bool:
    stated = file.value("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    return file.value("tokenizer.ggml.model") == "llama" or file.value("tokenizer.ggml.pre") in _OF_LLAMA3


def _complete(backend: dict[str, Any], file: GgufFile) -> None:
    """Put into a tokenizer.json what transformers leaves out, and take out what is not in the file."""
    split, num_tokens = file.value("tokenizer.ggml.pre"), len(file.value("tokenizer.ggml.tokens"))
    # Classes add tokens of their own that the model does not have.
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["id"] < num_tokens]
    if split in _OF_LLAMA3:
        backend["model"]["ignore_merges"] = True
    if split == _SMOLLM:
        digits = {"type": "Digits", "individual_digits": True}
        backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, backend["pre_tokenizer"]]}
    if file.value("tokenizer.ggml.add_space_prefix") is False:
        _leave_out_first_space(backend)


def _leave_out_first_space(backend: dict[str, Any]) -> None:
    split, normalizer, decoder = (backend[part] or {} for part in ("pre_tokenizer", "normalizer", "decoder"))
    if split.get("type") == "Metaspace":
        split["prepend_scheme"] = "never"
    for part, name, kind in ((normalizer, "normalizers", "Prepend"), (decoder, "decoders", "Strip")):
        if name in part:
            part[name] = [step for step in part[name] if step["type"] != kind]
