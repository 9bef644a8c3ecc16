"""The tokenizer, chat template and end tokens of a GGUF file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

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
        read: Any = AutoTokenizer.from_pretrained(
            source, gguf_file=name, trust_remote_code=False, local_files_only=True
        )
        backend = json.loads(read.backend_tokenizer.to_str())
    except Exception as error:  # the libraries raise anything from KeyError to bare Exception
        raise ConfigError(f"cannot read the tokenizer in {file.path}: {first_line(error)}", param="model") from error
    if file.value("tokenizer.ggml.add_space_prefix") is False:
        backend = _without_first_space(backend)
    if file.value("tokenizer.ggml.pre") == _SMOLLM:
        digits = {"type": "Digits", "individual_digits": True}
        backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, backend["pre_tokenizer"]]}
    special = {f"{kind}_token": getattr(read, f"{kind}_token") for kind in _SPECIAL}
    template = file.value("tokenizer.chat_template")
    # Of the general class, as families' own rebuild what tokenizer.json has.
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
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
    if kind not in _KINDS or not file.value("tokenizer.ggml.tokens"):
        known = ", ".join(_KINDS)
        raise ConfigError(f"{file.path} has a tokenizer of kind {kind!r}, known are: {known}", param="model")
    if kind != "gpt2":
        return
    known_splits = {*_AS_GPT2, *_known_splits(), _SMOLLM}
    if split in (None, "default"):
        logger.warning("%s does not say how texts are split before tokens are found: as for GPT-2, then", file.path)
    elif split not in known_splits:
        known = ", ".join(sorted(known_splits))
        raise ConfigError(f"{file.path} splits texts in the way {split!r}, known are: {known}", param="model")


def _known_splits() -> set[str]:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return set(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)


def _without_first_space(backend: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that puts no space before a text."""
    for part in (backend.get("pre_tokenizer"), backend.get("decoder")):
        for step in (part or {}).get("pretokenizers", [part] if part else []):
            if step.get("type") == "Metaspace":
                step["prepend_scheme"] = "never"
    return backend
