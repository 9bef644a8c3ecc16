"""The process that compiles grammars from clients: a grammar that exceeds the limits takes down only this process.

Started by ``GrammarChecker``. It reads one line of JSON per grammar, ``[kind, source]``, and writes one, ``[grammar,
error]``; a first line, written before any is read, says whether the model's tokenizer supports grammars at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from ...protocol.grammar import JSON_WHITESPACE, PARSER_LIMITS, tokenizer_options
from ...protocol.json_schema import closed
from ...protocol.lifeline import die_with
from ...protocol.model_card import ModelCard
from ...protocol.tokenizer_files import load_tokenizer_json

_MAX_REASON_CHARS = 500  # of a message, which may quote all of the form, or list all that was expected
_JSON_DEFAULTS: Any = {"whitespace_pattern": JSON_WHITESPACE}
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)  # llama.cpp's notation; Lark's has no such line


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles grammars for the prepare worker of a Triptych pipeline.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    try:
        compiler = _Compiler(arguments.run_dir)
    except Exception as error:  # raised by the library: it does not support this tokenizer
        _answer("", f"this model's answers cannot be constrained: {error!s:.200}")
        return
    _limit_memory(arguments.memory_bytes)
    _answer("", "")
    for line in sys.stdin:
        _answer(*compiler.compile(*json.loads(line)))


class _Compiler:
    def __init__(self, run_dir: Path) -> None:
        try:
            import llguidance  # imported here: an optional dependency
            from llguidance.gbnf_to_lark import gbnf_to_lark
        except ImportError as error:
            raise ValueError("llguidance is not installed, pip install 'triptych[structured]'") from error
        card = ModelCard.read(run_dir)
        assert card is not None, "prepare starts after the card is published"
        if not card.eos_token_ids:
            raise ValueError("the model has no token that ends a sequence")
        self._matcher = llguidance.LLMatcher
        self._to_lark = llguidance.regex_to_lark
        self._gbnf_to_lark = gbnf_to_lark
        self._limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        self._tokenizer = llguidance.LLTokenizer(load_tokenizer_json(run_dir), **tokenizer_options(card))

    def compile(self, kind: str, source: str) -> tuple[str, str]:
        """The grammar as execute will run it, or why it does not compile."""
        try:
            grammar = self._grammar(kind, source)
            matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # much of it is built lazily, for the first token
        except Exception as error:
            return "", f"does not compile: {_reason(str(error))}"
        return (grammar, "") if not matcher.is_error() else ("", f"does not compile: {_reason(matcher.get_error())}")

    def _grammar(self, kind: str, source: str) -> str:
        if kind == "json_schema":
            schema = json.loads(source)
            return str(self._matcher.grammar_from_json_schema(json.dumps(closed(schema)), _defaults_for(schema)))
        if kind == "regex":
            # Its default conversion lets \\d match the digits of every script, which is hardly ever intended.
            source = f"start: /{self._to_lark(source, use_ascii='d')}/"
        elif _GBNF.search(source):
            source = self._gbnf_to_lark(source)
        return str(self._matcher.grammar_from_lark(source))


def _defaults_for(schema: dict[str, Any]) -> Any:
    """Options that are added to those of the schema; they would replace its own."""
    own = schema.get("x-guidance", {})
    decides = not isinstance(own, dict) or any(name.startswith("whitespace") for name in own)
    return None if decides else _JSON_DEFAULTS


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by at most ``num_bytes`` from here on; allocations beyond that abort it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reason(error: str) -> str:
    reason = error.partition("<non-verbose/>")[0].strip()
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]} ..."


def _answer(grammar: str, error: str) -> None:
    sys.stdout.write(json.dumps([grammar, error]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of the library have nothing to finish
