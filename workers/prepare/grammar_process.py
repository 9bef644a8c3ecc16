"""The process that compiles grammars of strangers, so that one that takes too much takes only this process with it.

Started by ``GrammarChecker``. It reads a line of JSON for each grammar, ``[kind, source]``, and writes one, ``[grammar,
error]``; the first line it writes, before it reads any, says whether the model's tokenizer can be constrained at all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from ...protocol.grammar import PARSER_LIMITS, tokenizer_options
from ...protocol.lifeline import die_with
from ...protocol.model_card import ModelCard
from ...protocol.tokenizer_files import TOKENIZER_FILE

# A space, or a line break and an indentation: without a bound a small model goes on with white space until max_tokens.
# The "x-guidance" of a schema is taken instead.
_JSON_DEFAULTS: Any = {"whitespace_pattern": r"\x20|\x0A{1,2}[\x20\x09]{0,20}"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles grammars for the prepare worker of a Triptych pipeline.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    try:
        compiler = _Compiler(arguments.run_dir)
    except Exception as error:  # of the library: whatever it raises, this tokenizer is not for it
        _answer("", f"this model's answers cannot be constrained: {error!s:.200}")
        return
    _limit_memory(arguments.memory_bytes)
    _answer("", "")
    for line in sys.stdin:
        _answer(*compiler.compile(*json.loads(line)))


class _Compiler:
    def __init__(self, run_dir: Path) -> None:
        try:
            import llguidance  # here, because it is an optional dependency
        except ImportError as error:
            raise ValueError("llguidance is not installed, pip install 'triptych[structured]'") from error
        card = ModelCard.read(run_dir)
        assert card is not None, "prepare begins once there is one"
        if not card.eos_token_ids:
            raise ValueError("the model has no token that ends a sequence")
        self._matcher = llguidance.LLMatcher
        self._to_lark = llguidance.regex_to_lark
        self._limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        tokenizer_json = (run_dir / TOKENIZER_FILE).read_text(encoding="utf-8")
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, **tokenizer_options(card))

    def compile(self, kind: str, source: str) -> tuple[str, str]:
        """The grammar as execute will run it, or why it cannot."""
        try:
            grammar = self._grammar(kind, source)
            matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # much is only built when the first token is looked for
        except Exception as error:
            return "", f"does not compile: {error}"
        return (grammar, "") if not matcher.is_error() else ("", f"does not compile: {_reason(matcher.get_error())}")

    def _grammar(self, kind: str, source: str) -> str:
        if kind == "json_schema":
            is_guided = "x-guidance" in json.loads(source)
            return str(self._matcher.grammar_from_json_schema(source, None if is_guided else _JSON_DEFAULTS))
        if kind == "regex":
            # Its own conversion lets \\d stand for the digits of every script, which hardly anybody means.
            source = f"start: /{self._to_lark(source, use_ascii='d')}/"
        return str(self._matcher.grammar_from_lark(source))


def _limit_memory(num_bytes: int) -> None:
    """From here on the process may grow by so much; what asks for more aborts."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reason(error: str) -> str:
    return error.partition("<non-verbose/>")[0].strip()


def _answer(grammar: str, error: str) -> None:
    sys.stdout.write(json.dumps([grammar, error]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of the library have nothing to finish
