"""The checkpoint's tokenizer, written into the run directory for the processes that have no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from ....protocol.errors import ConfigError
from ....protocol.tokenizer_files import TokenizerFacts, save_tokenizer

# Without one of these AutoTokenizer may still make a tokenizer: an empty one.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)


def export_tokenizer(model_dir: Path, run_dir: Path) -> TokenizerFacts:
    """Write the tokenizer of a checkpoint as ``protocol.tokenizer_files`` describes.

    Raises:
        ConfigError: as ``load_tokenizer``.
    """
    return write_tokenizer(load_tokenizer(model_dir), run_dir)


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a local checkpoint.

    Raises:
        ConfigError: there is none, it cannot be read, or it exists as Python code only.
    """
    if not any((model_dir / name).is_file() for name in _VOCABULARY_FILES):
        raise ConfigError(f"{model_dir} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, use_fast=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the libraries raise anything from OSError to bare Exception
        raise ConfigError(f"cannot read the tokenizer in {model_dir}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"the tokenizer in {model_dir} is {type(tokenizer).__name__}, which runs as Python code only; "
            "save it as tokenizer.json"
        )
    if not tokenizer.get_vocab():
        raise ConfigError(f"the tokenizer in {model_dir} has an empty vocabulary")
    return tokenizer


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, run_dir: Path) -> TokenizerFacts:
    """Write the two files and return what the second one says."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    facts = TokenizerFacts(
        vocab_size=vocab_size(tokenizer),
        chat_template=_default_template(tokenizer.chat_template),
        special_tokens=special,
        bos_token_id=tokenizer.bos_token_id,
    )
    save_tokenizer(run_dir, backend.to_str(), facts)
    return facts


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the greatest id: ids may have gaps, so counting tokens is not enough."""
    return int(max(tokenizer.get_vocab().values())) + 1


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """More ids in the model than in the tokenizer are common (padding), fewer are a mix-up.

    Raises:
        ConfigError: the tokenizer has ids that the model has not.
    """
    in_model, in_tokenizer = config.get_text_config().vocab_size, vocab_size(tokenizer)
    if in_model < in_tokenizer:
        raise ConfigError(
            f"the tokenizer has {in_tokenizer} ids and the model {in_model}: they are not of the same checkpoint",
            param="model",
        )


def _default_template(template: Any) -> str | None:
    """The template itself, or of several by name the one called "default"."""
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
