"""Large amounts are sent in parts, and a reader with a full queue costs the others nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.protocol.factories import TIMES, make_record
from tests.simulation.clock import installed
from tests.simulation.journal import make_journal
from tests.simulation.processes import Worker
from tests.simulation.world import World
from triptych.protocol import messages as m
from triptych.protocol.codec import encode
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestWriter
from triptych.workers.summarize.delivery import RETRY_S, SENDING_S
from triptych.workers.summarize.process import Summarize

NAMES = [f"r{number}" for number in range(24)]
MAKE_NS = 10_000_000  # to build a message and send it, with 256 tokens and 20 logprobs each


@pytest.fixture
def world() -> Iterator[World]:
    """The journal holds many kept answers."""
    world = World(0)
    world.journal = make_journal(len(NAMES), 1 << 16, clock_shift_ns=0)
    with installed(world.clock):
        for name in NAMES:
            key = RequestWriter(world.journal).accept(make_record(name, logprobs=20), TIMES)
            ReleaseWriter(world.journal).release(*key, num_tokens=0, reason="stop")
        yield world


class Readers:
    """What they received; the queues of those in ``full`` have no space."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.given, self.full = world, list[tuple[bytes, str]](), set[bytes]()
        self.num_tries = 0
        body = Worker(world, "summarize")._build()
        assert isinstance(body, Summarize)
        self.body = body
        monkeypatch.setattr(body._router, "deliver", self._deliver)

    def _deliver(self, peer: bytes, message: Any) -> bool:
        self.num_tries += 1
        self.world.clock.advance_to(self.world.clock.now_ns + MAKE_NS)
        if peer not in self.full:
            self.given.append((peer, message.request_id))
        return peer not in self.full

    def ask(self, peer: bytes, names: list[str]) -> None:
        self.body._on_frame_safely(peer, encode(m.Follow([[name, 0, True] for name in names])))

    def wait_and_turn(self) -> None:
        wait_s = self.body._delivery.wait_s
        assert wait_s is not None
        self.world.clock.advance_to(self.world.clock.now_ns + int(wait_s * 1e9))
        self.body.turn()


def test_stop_tells_every_reader_its_end_even_if_that_takes_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an overloaded machine: those not told in two seconds waited for ever."""
    monkeypatch.setattr("triptych.workers.summarize.process.LAST_WORDS_S", MAKE_NS / 1e9)
    readers = Readers(world, monkeypatch)
    readers.ask(b"reader", NAMES)
    readers.body._end_all()
    assert readers.given == [(b"reader", name) for name in NAMES]


def test_stop_waits_longer_for_readers_where_it_waits_for_a_processor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions that arrived after two seconds had no answer, which with 2 % of a processor were three of four."""
    monkeypatch.setattr("triptych.protocol.starvation.run_delays", lambda pid: {pid: world.clock.now_ns})
    readers, turns, turn = Readers(world, monkeypatch), iter(range(100)), Summarize.turn

    def turn_slowly(body: Summarize) -> None:
        turn(body)
        world.clock.advance_to(world.clock.now_ns + 10**9)
        if next(turns) == 5:
            readers.ask(b"reader", NAMES)

    monkeypatch.setattr(Summarize, "turn", turn_slowly)
    readers.body._end_all()
    assert readers.given == [(b"reader", name) for name in NAMES]


def test_one_follow_of_many_kept_answers_takes_many_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one turn it took so long that the process was killed as hung."""
    readers = Readers(world, monkeypatch)
    readers.ask(b"greedy", NAMES)
    began_ns, num_turns = world.clock.now_ns, 0
    while readers.body._delivery.pending:
        before_ns = world.clock.now_ns
        readers.wait_and_turn()
        assert world.clock.now_ns - before_ns < SENDING_S * 1e9 + 2 * MAKE_NS
        num_turns += 1
    assert num_turns >= len(NAMES) * MAKE_NS / 1e9 / (SENDING_S + 0.02)
    assert readers.given == [(b"greedy", name) for name in NAMES]
    assert world.clock.now_ns - began_ns < (len(NAMES) + 1) * MAKE_NS  # it did not sleep while there was work


def test_client_that_asks_again_and_again_gets_no_more_than_its_share(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(world, monkeypatch)
    greedy, modest = NAMES[:-1], NAMES[-1]
    readers.ask(b"greedy", greedy)
    readers.ask(b"modest", [modest])
    while (b"modest", modest) not in readers.given:
        readers.wait_and_turn()
        readers.ask(b"greedy", greedy)
    assert readers.given.index((b"modest", modest)) == len(greedy)


def test_reader_with_a_full_queue_is_retried_occasionally(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers(world, monkeypatch)
    readers.full.add(b"stalled")
    readers.ask(b"stalled", NAMES[:-1])
    readers.ask(b"other", NAMES[-1:])
    readers.wait_and_turn()
    assert readers.given == [(b"other", NAMES[-1])]
    for num_tries in (3, 4, 5):
        assert readers.body._delivery.wait_s == RETRY_S
        readers.wait_and_turn()
        assert readers.num_tries == num_tries
    readers.full.clear()
    while readers.body._delivery.pending:
        readers.wait_and_turn()
    assert sorted(readers.given[1:]) == sorted((b"stalled", name) for name in NAMES[:-1])


def test_sent_rows_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logprobs they take hundreds of kilobytes, and the journal holds them in less."""
    readers = Readers(world, monkeypatch)
    readers.ask(b"reader", NAMES[:1])
    readers.wait_and_turn()
    [answer] = [each for each in readers.body._answers.values() if each.wire_id == NAMES[0]]
    assert answer.end_sent_to == b"reader"
    assert not [value for value in vars(answer).values() if isinstance(value, (m.Finished, m.Failed, m.Text))]
