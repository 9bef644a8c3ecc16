"""The tokenizer, chat template and end tokens of a GGUF file."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ......protocol.errors import ConfigError
from ...tokenizer import load_tokenizer
from ..hub import first_line
from .file import GgufFile
from .splits import AS_GPT2, SPLITS, WITH_BOS, WITH_WHOLE_WORDS

logger = logging.getLogger(__name__)

_KINDS = ("gpt2", "llama")  # byte-level BPE, SentencePiece's BPE
_SPECIAL = ("bos", "eos", "unk", "pad")
_ENDS = ("eos", "eot", "eom")  # settings with the id of a token that ends an answer
# Tokens that end an answer wherever they exist: llama.cpp knows them by name too.
_NAMES_OF_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|end_of_text|>", "[EOT]", "[EOS]",
    "<end_of_utterance>", "[e~[",
)  # fmt: skip
_END = "<|end|>"  # the end of a message, and not of the answer, in vocabularies with one of these
_ENDS_OF_ANSWERS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
_OBSERVATION = "<|observation|>"  # where GLM-4 waits for the result of a call
_NORMAL, _CONTROL, _BY_THE_USER = 1, 3, 4  # token types


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
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        add_bos_token=_adds_bos(file),
        add_eos_token=bool(file.value("tokenizer.ggml.add_eos_token")),
        **{name: token for name, token in special.items() if token is not None},
    )
    tokenizer.save_pretrained(target)
    split, made = (json.loads(each.backend_tokenizer.to_str()) for each in (load_tokenizer(target), tokenizer))
    if split["pre_tokenizer"] != made["pre_tokenizer"]:  # some families have their own
        how = file.value("tokenizer.ggml.pre")
        text = f"{file.path} splits texts in the way {how!r}, which is not that of {file.architecture}"
        raise ConfigError(text, param="model")


def write_generation_config(file: GgufFile, target: Path) -> None:
    """Write which tokens begin and end an answer."""
    ends = {file.value(f"tokenizer.ggml.{kind}_token_id") for kind in _ENDS}
    tokens, types = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type") or []
    pairs = zip(tokens, types, strict=False)
    special = {token: number for number, (token, type_) in enumerate(pairs) if type_ != _NORMAL}
    names = {*_NAMES_OF_ENDS, *([_OBSERVATION] if file.value("tokenizer.ggml.pre") in ("glm4", "glm5") else ())}
    if any(special.keys() >= others for others in _ENDS_OF_ANSWERS):
        ends.discard(special.get(_END))
        names.discard(_END)
    ends |= {special.get(name) for name in names}
    config: Any = GenerationConfig(
        bos_token_id=file.value("tokenizer.ggml.bos_token_id"),
        eos_token_id=sorted(end for end in ends if end is not None) or None,
        pad_token_id=file.value("tokenizer.ggml.padding_token_id"),
    )
    config.save_pretrained(target)


def _check_kind(file: GgufFile) -> None:
    kind, split = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre")
    known_splits = {*AS_GPT2, *_known_splits(), *SPLITS}
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
    return file.value("tokenizer.ggml.model") == "llama" or file.value("tokenizer.ggml.pre") in WITH_BOS


def _complete(backend: dict[str, Any], file: GgufFile) -> None:
    """Put into a tokenizer.json what transformers leaves out, and take out what is not in the file."""
    split, num_tokens = file.value("tokenizer.ggml.pre"), len(file.value("tokenizer.ggml.tokens"))
    # Classes add tokens of their own that the model does not have.
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["id"] < num_tokens]
    if file.value("tokenizer.ggml.model") == "gpt2":
        _name_special_tokens(backend, file)
        backend["model"]["ignore_merges"] = split in WITH_WHOLE_WORDS
        if split in SPLITS:
            backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": SPLITS[split]}
    if file.value("tokenizer.ggml.add_space_prefix") is False:
        _leave_out_first_space(backend)
    elif (backend["pre_tokenizer"] or {}).get("type") == "Metaspace":
        _begin_with_space(backend)


def _name_special_tokens(backend: dict[str, Any], file: GgufFile) -> None:
    """Call special tokens as the file does. transformers takes them for misspelled bytes if their characters stand for
    none, as those of "<｜User｜>", and would cut them into pieces.
    """
    tokens, types = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type") or []
    added = {token["id"]: token for token in backend["added_tokens"]}
    spelled = {number: token for token, number in backend["model"]["vocab"].items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = {}
    for number, (token, type_) in enumerate(zip_longest(tokens, types[: len(tokens)], fillvalue=_NORMAL)):
        if type_ in (_CONTROL, _BY_THE_USER):
            vocabulary[token] = number
            added.setdefault(number, {"id": number, "content": token, "special": type_ == _CONTROL, **flags})
        else:  # which have all their names only if no special token took one
            vocabulary[spelled.get(number, token)] = number
    backend["model"]["vocab"] = vocabulary
    backend["added_tokens"] = [added[number] for number in sorted(added)]


def _begin_with_space(backend: dict[str, Any]) -> None:
    """Begin each text with a space of its own, also one that begins with a space, and also behind special tokens."""
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    backend["normalizer"], backend["pre_tokenizer"] = {"type": "Sequence", "normalizers": steps}, None


def _leave_out_first_space(backend: dict[str, Any]) -> None:
    split, normalizer, decoder = (backend[part] or {} for part in ("pre_tokenizer", "normalizer", "decoder"))
    if split.get("type") == "Metaspace":
        split["prepend_scheme"] = "never"
    for part, name, kind in ((normalizer, "normalizers", "Prepend"), (decoder, "decoders", "Strip")):
        if name in part:
            part[name] = [step for step in part[name] if step["type"] != kind]
