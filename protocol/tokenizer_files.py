"""The model's tokenizer as two files in the run directory.

execute, which has the libraries to read any checkpoint, writes them once. prepare and summarize, which do not import
those and start in a tenth of the time, read them: ``tokenizer.json`` for the ``tokenizers`` library, and beside it
``TokenizerFacts``. The first is compressed, as it may have 20 MB, and a container's ``/dev/shm`` has 14 MB beside the
journal; a reader takes 4 % longer for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .plain import load_map, make
from .private_file import write_private

TOKENIZER_FILE = "tokenizer.json.gz"
FACTS_FILE = "tokenizer_facts.json"
TEMPLATE_FILE = "chat_template.jinja"  # the operator's, in place of the checkpoint's


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What tokenizer.json does not say."""

    vocab_size: int  # of the tokenizer, added tokens included
    chat_template: str | None  # Jinja
    special_tokens: dict[str, str]  # "bos_token" -> "<s>", ...: available to the chat template
    bos_token_id: int | None


def save_tokenizer(folder: Path, tokenizer_json: str, facts: TokenizerFacts) -> None:
    """Write both files; the facts file comes last, so a reader sees both or none. Existing files are kept.

    Raises:
        ConfigError: a different tokenizer is in use: live requests hold its token ids; or there is no space for it.
    """
    facts_json = json.dumps(dataclasses.asdict(facts))
    if (folder / FACTS_FILE).exists():
        served = load_tokenizer_json(folder), (folder / FACTS_FILE).read_text(encoding="utf-8")
        if served != (tokenizer_json, facts_json):
            raise ConfigError("the model has another tokenizer than the one that is being served", param="model")
        return
    compressed = gzip.compress(tokenizer_json.encode(), compresslevel=1, mtime=0)
    try:
        write_private(folder / TOKENIZER_FILE, compressed)
        write_private(folder / FACTS_FILE, facts_json)
    except OSError as error:
        raise ConfigError(
            f"the tokenizer cannot be written to {folder}, it needs {len(compressed)} bytes: {error.strerror};"
            " use a --run-dir with enough free space, or a smaller --arena-bytes",
            param="run_dir",
        ) from error


def is_same_tokenizer(folder: Path, other: Path) -> bool:
    """Whether the files in both folders are the same, byte for byte: a tenth of the work of unpacking a tokenizer."""
    try:
        return all((folder / name).read_bytes() == (other / name).read_bytes() for name in (FACTS_FILE, TOKENIZER_FILE))
    except FileNotFoundError:
        return False


def load_tokenizer_json(folder: Path) -> str:
    """What ``Tokenizer.from_str`` takes, once there are facts.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        return gzip.decompress((folder / TOKENIZER_FILE).read_bytes()).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{folder / TOKENIZER_FILE} is damaged: {error}") from error


def load_facts(folder: Path) -> TokenizerFacts | None:
    """The facts, with the operator's chat template if there is one; None until execute has written them.

    Raises:
        ConfigError: the file exists but is malformed.
    """
    try:
        text = (folder / FACTS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    facts = make(TokenizerFacts, load_map(text, FACTS_FILE), FACTS_FILE)
    with contextlib.suppress(FileNotFoundError):
        facts = dataclasses.replace(facts, chat_template=(folder / TEMPLATE_FILE).read_text(encoding="utf-8"))
    return facts
