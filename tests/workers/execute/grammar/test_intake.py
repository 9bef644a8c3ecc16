"""Sequences wait for their grammar, and for nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import eventually
from tests.workers import tokenizer_zoo
from tests.workers.execute.factories import make_sequence
from tests.workers.grammars import make_card, model_dir
from triptych.protocol.channels import Bell, Poller
from triptych.protocol.reasoning import Reasoning
from triptych.workers.execute.grammar.intake import GrammarIntake
from triptych.workers.execute.grammar.matcher import GrammarCompiler, GrammarMatcher
from triptych.workers.execute.scheduling.sequence import Sequence


class FakeCompiler(GrammarCompiler):
    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def compile(self, grammar: str, reasoning: Reasoning | None = None) -> GrammarMatcher:
        self._act()
        return GrammarMatcher.__new__(GrammarMatcher)


def test_sequence_returns_with_its_matcher(tmp_path: Path) -> None:
    tokenizer = tokenizer_zoo.byte_level()
    intake = GrammarIntake(GrammarCompiler(model_dir(tmp_path, tokenizer), make_card(tokenizer)), Bell())
    good, bad = make_sequence(1), make_sequence(2)
    intake.add(good, 'start: "a"')
    intake.add(bad, "start: foo")
    assert len(intake) == 2
    done: dict[Sequence, str] = {}
    eventually(lambda: done.update(intake.take_done()) or len(done) == 2)
    assert len(intake) == 0
    assert isinstance(good.grammar, GrammarMatcher)
    assert done[good] == ""
    assert "the grammar does not compile" in done[bad]
    intake.close()


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("x")])
def test_any_compiler_error_fails_only_that_sequence(error: Exception) -> None:
    def fail() -> None:
        raise error

    intake, sequence = GrammarIntake(FakeCompiler(fail), Bell()), make_sequence(1)
    intake.add(sequence, "g")
    [(_, reason)] = eventually(lambda: list(intake.take_done()))
    assert str(error) in reason
    intake.close()


def test_dropped_sequence_does_not_return_and_its_bell_can_be_silenced() -> None:
    go = threading.Event()
    intake, sequence = GrammarIntake(FakeCompiler(go.wait), Bell()), make_sequence(1)
    poller = Poller(intake.bell.file)
    intake.add(sequence, "g")
    intake.drop(sequence.key)
    assert len(intake) == 0
    go.set()
    poller.wait(10.0)
    intake.bell.silence()
    assert list(intake.take_done()) == []
    with pytest.raises(BlockingIOError):
        os.eventfd_read(intake.bell.file)
    intake.close()
