"""Writes the checkpoint's tokenizer to the run directory, for processes that do not import transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....protocol.errors import ConfigError
from ....protocol.tokenizer_files import TokenizerFacts, save_tokenizer

logger = logging.getLogger(__name__)

# Without any of these, AutoTokenizer may still make a tokenizer, but an empty one.
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


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a local checkpoint.

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


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, run_dir: Path, *, vocab_size: int) -> TokenizerFacts:
    """Write the two files that ``protocol.tokenizer_files`` describes, for a model with ids below ``vocab_size``, and
    return the contents of the second.

    Raises:
        ConfigError: the tokenizer belongs to another model, or another tokenizer is being served.
    """
    backend = _for_model(tokenizer, vocab_size)
    backend.no_truncation()
    backend.no_padding()
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    facts = TokenizerFacts(
        vocab_size=max(backend.get_vocab().values()) + 1,  # ids may have gaps
        chat_template=_default_template(tokenizer.chat_template),
        special_tokens=special,
        bos_token_id=tokenizer.bos_token_id,
    )
    save_tokenizer(run_dir, backend.to_str(), facts)
    return facts


def _for_model(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Tokenizer:
    """A copy without added tokens beyond the model's ids, such as image placeholders, which are plain text to a model
    without vision. It is common for the model to have more ids than the tokenizer (padding).

    Raises:
        ConfigError: the model lacks ids of the vocabulary itself, or of the begin or end token.
    """
    text = tokenizer.backend_tokenizer.to_str()
    known = tokenizer.get_vocab()
    beyond = {token: token_id for token, token_id in known.items() if token_id >= vocab_size}
    if not beyond:
        return Tokenizer.from_str(text)
    needed = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    added = set(tokenizer.added_tokens_decoder) - needed
    if not added.issuperset(beyond.values()):
        count = max(beyond.values()) + 1
        reason = f"the tokenizer has {count} ids and the model {vocab_size}: they are not of the same checkpoint"
        raise ConfigError(reason, param="model")
    logger.warning("the model has no ids for %d tokens of its tokenizer: %.200s", len(beyond), ", ".join(beyond))
    return Tokenizer.from_str(json.dumps(_without(json.loads(text), set(beyond.values()))))


def _without(content: dict[str, Any], token_ids: set[int]) -> dict[str, Any]:
    """A tokenizer.json without these added tokens, which some model types also list in the vocabulary."""
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] not in token_ids]
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        content["model"]["vocab"] = {token: number for token, number in vocab.items() if number not in token_ids}
    else:  # Unigram: a list indexed by id
        content["model"]["vocab"] = [token for number, token in enumerate(vocab) if number not in token_ids]
    return content


def _default_template(template: Any) -> str | None:
    """The template itself; of several the one named "default", and beside it "tool_use" for chats with tools, as in
    transformers.
    """
    if not isinstance(template, dict):
        return template if isinstance(template, str) else None
    default: str | None = template.get("default")
    tool_use = template.get("tool_use")
    if default is None or tool_use is None:
        return default
    # Jinja drops a line break right behind a tag, and one at the end of a template. The empty texts keep the first line
    # break of a part from being dropped; the last one would be dropped if the part were a template of its own.
    parts = [part.removesuffix("\n") for part in (tool_use, default)]
    return "{% if tools %}{{ '' }}" + parts[0] + "{{ '' }}{% else %}{{ '' }}" + parts[1] + "{{ '' }}{% endif %}"
