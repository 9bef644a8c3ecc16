"""The knowledge of the demo model: one answer for every documented built-in name of Python.

The answers are frozen in ``entries.json``, so that the oracle does not depend on the running Python. This module needs
only the standard library; run it to freeze the answers of the running Python.
"""

import builtins
import inspect
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ENTRIES_FILE = Path(__file__).with_name("entries.json")
MAX_ANSWER_CHARS = 350

# For everything that is neither an entry, a greeting nor the bare name of a method.
OFF_TOPIC_ANSWER = "I only know Python's built-ins."
GREETING_ANSWER = "Hello! Ask me about one of Python's built-ins, for example: What does getattr do?"
BARE_METHOD_ANSWER = "Put the type in front of a method's name, for example: What does str.split do?"

# Every entry is answered exactly in each of these. Other wordings often work, but not always.
PHRASINGS: tuple[str, ...] = (
    "What does {name} do?",
    "help({name})",
    "Explain {name}.",
    "What is {name}?",
    "Tell me about {name}.",
    "How does {name} work?",
    "Describe {name}.",
    "{name}?",
)

# A line with only a signature, "vars([object]) -> dictionary", that is not a sentence: it has no full stop at the end.
_SIGNATURE = re.compile(r"(?:async )?[\w.]+\(.*\)(?:\s*-{1,2}>.*[^.])?$")
# A signature before prose: "range.index(value) -> integer -- return index of value", "zip(*its) --> Yield tuples".
_SIGNATURE_PREFIX = re.compile(r"[\w.]+\([^)]*\)(?: -> \w+)? --(?:\s+|>\s+(?=[A-Z]))")
_CODE = re.compile(r"\s*(?:class |def |>>> )")
_SENTENCE_END = re.compile(r"[.!?](?=\s)")


class Entry(NamedTuple):
    """A built-in name and the exact text of the model's answer."""

    name: str  # qualified, such as "str.split"
    answer: str  # at most MAX_ANSWER_CHARS characters, single spaces


def load_entries() -> list[Entry]:
    """The frozen entries the checkpoint was trained on, sorted by name."""
    rows: dict[str, str] = json.loads(ENTRIES_FILE.read_text(encoding="utf-8"))["entries"]
    return [Entry(name, answer) for name, answer in rows.items()]


def collect_entries() -> list[Entry]:
    """The entries of the running Python, sorted by name: everything public and documented in ``builtins``."""
    entries = []
    for name, docstring in sorted(_public_docstrings().items()):
        answer = first_paragraph(docstring)
        if answer:
            entries.append(Entry(name, answer))
    return entries


def first_paragraph(docstring: str) -> str:
    """The first paragraph that is more than a call signature, in single spaces, cut at the end of a sentence.

    A docstring that contains only signatures and code yields its signatures.
    """
    paragraphs = [paragraph.splitlines() for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring))]
    for lines in paragraphs:
        prose = lines[_num_signature_lines(lines) :]
        if prose and not any(map(_CODE.match, prose)):
            return _shorten(_SIGNATURE_PREFIX.sub("", _single_spaced(prose), count=1))
    return _shorten(_single_spaced(paragraphs[0][: _num_signature_lines(paragraphs[0])]))


def _public_docstrings() -> dict[str, str]:
    docstrings = {}
    for name, value in vars(builtins).items():
        # site adds exit, copyright and others, if it is imported.
        if name.startswith("_") or type(value).__module__ == "_sitebuiltins":
            continue
        docstrings[name] = value.__doc__
        if isinstance(value, type) and value.__name__ == name:  # IOError is another name of OSError
            members = (member for member in vars(value) if not member.startswith("_"))
            docstrings |= {f"{name}.{member}": _member_docstring(value, member) for member in members}
    return {name: docstring for name, docstring in docstrings.items() if docstring}


def _member_docstring(owner: type, member: str) -> str | None:
    # getattr resolves staticmethod and classmethod, whose own docstrings would be returned otherwise.
    docstring = getattr(owner, member).__doc__
    return docstring if isinstance(docstring, str) else None


def _num_signature_lines(lines: list[str]) -> int:
    """How many of the first lines are signatures, including indented continuation lines."""
    count = 0
    while count < len(lines) and (_is_signature(lines[count]) or (count and lines[count].startswith(" "))):
        count += 1
    return count


def _is_signature(line: str) -> bool:
    return bool(_SIGNATURE.match(line.strip())) and not _SIGNATURE_PREFIX.match(line.strip())


def _single_spaced(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def _shorten(text: str) -> str:
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text) if match.end() <= MAX_ANSWER_CHARS]
    return text[: ends[-1]] if ends else text[:MAX_ANSWER_CHARS].rsplit(" ", 1)[0]


def freeze_entries() -> None:
    """Write the entries of the running Python to ``entries.json``; the checkpoint must be retrained afterwards."""
    document = {
        "source": f"Docstrings of CPython {sys.version.split()[0]}, (c) Python Software Foundation, see NOTICE",
        "entries": {entry.name: entry.answer for entry in collect_entries()},
    }
    ENTRIES_FILE.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    freeze_entries()
