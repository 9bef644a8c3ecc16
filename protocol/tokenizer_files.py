"""The model's tokenizer as two plain files in the run directory.

execute, which has the libraries that can read any checkpoint, writes them once; prepare and summarize, which have
not and start in a tenth of a second, read them: ``tokenizer.json`` for the ``tokenizers`` library and this module's
``TokenizerFacts`` beside it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .plain import load_map, make
from .private_file import write_private

TOKENIZER_FILE = "tokenizer.json"
FACTS_FILE = "tokenizer_facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What tokenizer.json does not say."""

    vocab_size: int  # of the tokenizer, added tokens included
    chat_template: str | None  # Jinja, as the checkpoint has it
    special_tokens: dict[str, str]  # "bos_token" -> "<s>", ... : what a chat template may refer to
    bos_token_id: int | None


def save_tokenizer(folder: Path, tokenizer_json: str, facts: TokenizerFacts) -> None:
    """Write both files; a reader sees both or, by the facts file, which comes last, none. What is there stays.

    Raises:
        ConfigError: another tokenizer is there, which prepare and summarize use: its ids are those of live requests.
    """
    files = {TOKENIZER_FILE: tokenizer_json, FACTS_FILE: json.dumps(dataclasses.asdict(facts))}
    if (folder / FACTS_FILE).exists():
        if any((folder / name).read_text(encoding="utf-8") != text for name, text in files.items()):
            raise ConfigError("the model has another tokenizer than the one that is being served", param="model")
        return
    for name, text in files.items():
        write_private(folder / name, text)


def load_facts(folder: Path) -> TokenizerFacts | None:
    """The facts, or None while execute has not written them.

    Raises:
        ConfigError: the file is there and is none of this kind.
    """
    try:
        text = (folder / FACTS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return make(TokenizerFacts, load_map(text, FACTS_FILE), FACTS_FILE)
