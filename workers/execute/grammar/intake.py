"""Sequences with a grammar, held out of the engine until it is compiled, so that no step waits for a compilation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ....protocol.channels import Bell
from ....protocol.reasoning import Reasoning
from ..scheduling.sequence import Key, Sequence
from .matcher import GrammarCompiler, GrammarMatcher


class GrammarIntake:
    """Compiles in a separate thread. ``bell`` rings after each compilation, even one whose sequence was dropped."""

    def __init__(self, compiler: GrammarCompiler, bell: Bell) -> None:
        self.bell = bell
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._pending: dict[Key, Sequence] = {}
        self._done: deque[tuple[Sequence, GrammarMatcher | str]] = deque()

    def __len__(self) -> int:
        """The number of sequences that wait for their grammar."""
        return len(self._pending)

    def add(self, sequence: Sequence, grammar: str, reasoning: Reasoning | None = None) -> None:
        self._pending[sequence.key] = sequence
        self._thread.submit(self._compile, sequence, grammar, reasoning)

    def drop(self, key: Key) -> None:
        """Discard a sequence; the result of its compilation will be ignored."""
        self._pending.pop(key, None)

    def take_done(self) -> Iterator[tuple[Sequence, str]]:
        """Sequences whose compilation has ended, each with "" or its error. Does not silence the bell."""
        while self._done:
            sequence, result = self._done.popleft()
            if self._pending.pop(sequence.key, None) is not sequence:
                continue
            if isinstance(result, str):
                yield sequence, result
            else:
                sequence.grammar = result
                yield sequence, ""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, sequence: Sequence, grammar: str, reasoning: Reasoning | None) -> None:
        result: GrammarMatcher | str
        try:
            result = self._compiler.compile(grammar, reasoning)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library's Rust code is not an Exception
            result = f"the grammar does not compile: {error!s:.200}"
        self._done.append((sequence, result))
        self.bell.ring()
