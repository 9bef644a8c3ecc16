"""A trace of steps, one JSON line each, and of all that led to them: what ran when, in which batch, at what cost.

``triptych replay`` runs it again (see ``scheduling/recording.py``). It contains no tokens of prompts or answers: each
is replaced by a keyed hash of all tokens up to it, which is equal where two sequences begin alike, and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import logging
from hashlib import blake2b
from typing import Any, Protocol, TextIO

import numpy as np

from ...protocol.arrays import Int32
from .engine import StepOutputs, Trace
from .scheduling.audit import take_stats
from .scheduling.plan import Plan
from .scheduling.progress import Grown
from .scheduling.recorded_search import describe_choice
from .scheduling.recording import (
    STOP,
    describe_plan,
    describe_progress,
    describe_scheduler,
    describe_sequence,
    pack_tokens,
)
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Key, Sequence

logger = logging.getLogger(__name__)


def open_trace(path: str | None) -> TextIO | None:
    """The file for a trace, which is appended to an existing one; None if it cannot be written.

    The driver has checked the path before the first process: later, a disk may have failed, or a folder be gone, and
    requests must not wait for that.
    """
    if path is None:
        return None
    try:
        file = open(path, "a", buffering=1)  # noqa: SIM115, closed with the links
    except OSError as error:
        logger.warning("the trace cannot be written: %s", error.strerror)
        return None
    if file.tell():
        with contextlib.suppress(OSError):  # a full disk ends the trace (see ``StepTrace``), and not this process
            file.write("\n")  # an earlier process may have been killed in the middle of a line
    return file


class Writable(Protocol):
    """What a trace is written to."""

    def write(self, text: str, /) -> object: ...


class StepTrace(Trace):
    """Writes lines such as ``{"step": 7, "decodes": [0, 3], "prefills": [[4, 0, 512]], "ms": 2.5, ...}``.

    Sequences are identified by their slot in the journal. Whatever did not happen in a step is left out of its line.
    A line before the steps describes the scheduler. Lines between them describe sequences added and released; what
    happened during a step is written before it.
    """

    def __init__(self, file: Writable, scheduler: Scheduler, *, secret: bytes, model: str = "") -> None:
        self._file = file
        self._is_broken = False
        self._pseudonyms = Pseudonyms(secret)
        self._during: dict[str, int] = {}  # the step in flight
        self._scheduler = scheduler
        self._write({"trace": model, **describe_scheduler(scheduler)})

    def add(self, sequence: Sequence) -> None:
        key, tokens = sequence.key, sequence.tokens[: sequence.num_tokens]
        described = describe_sequence(sequence, self._pseudonyms.begin(key, tokens, is_beam=sequence.is_beam))
        salt = {"cache_salt": self._pseudonyms.of_salt(sequence.cache_salt)} if sequence.cache_salt else {}
        self._write({"add": list(key), "accepted_ns": sequence.accepted_at, **described, **salt, **self._during})

    def release(self, key: Key) -> None:
        self._pseudonyms.forget(key)
        self._write({"release": list(key), **self._during})

    def plan(self, plan: Plan | None, planned_at: int) -> None:
        if plan is None:
            self._write({"idle_ns": planned_at})
        else:
            self._during = {"during": plan.step}

    def write(self, outputs: StepOutputs) -> None:
        plan, progress = outputs.plan, outputs.progress
        line = {
            **describe_plan(plan),
            "planned_ns": outputs.planned_at,
            "launched_ns": outputs.launched_at,
            "collected_ns": outputs.collected_at,
            "ms": round((outputs.collected_at - outputs.launched_at) / 1e6, 4),
            **describe_progress(progress, take_stats(self._scheduler)),
        }
        if sampled := plan.sampled:
            line["tokens"] = pack_tokens(self._sampled(sampled, outputs))
        if progress.choices:
            line["choices"] = {
                str(key[0]): describe_choice(choice, self._pseudonyms.grow(choice.beams))
                for key, choice in progress.choices.items()
            }
        self._during = {}
        self._write(line)

    def _sampled(self, keys: list[Key], outputs: StepOutputs) -> Int32:
        """A token for each of ``keys``, 0 where there is none."""
        known, finished = outputs.progress.by_key(), outputs.progress.finished
        tokens = [self._pseudonyms.next(key, known[key]) if key in known else 0 for key in keys]
        for index, key in enumerate(keys):
            if finished.get(key) == "stop":
                tokens[index] = STOP
        return np.array(tokens, np.int32)

    def _write(self, line: dict[str, Any]) -> None:
        if self._is_broken:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:  # a full disk must not stop the worker on account of a trace
            self._is_broken = True
            logger.warning("the trace ends here: %s", error.strerror)


class Pseudonyms:
    """Replaces the tokens of sequences: two pseudonyms are equal if all tokens up to them are."""

    def __init__(self, secret: bytes) -> None:
        self._begin = blake2b(secret, digest_size=16).digest()
        self._states: dict[Key, bytes] = {}  # after the last token of each sequence
        self._prompts: dict[Key, bytes] = {}  # after the prompt of each beam, where its search may restart

    def begin(self, key: Key, tokens: Int32, *, is_beam: bool = False) -> Int32:
        """int32 [len(tokens)], none below zero."""
        self._states[key] = self._begin
        pseudonyms = np.array([self.next(key, token_id) for token_id in tokens.tolist()], np.int32)
        if is_beam:
            self._prompts[key] = self._states[key]
        return pseudonyms

    def next(self, key: Key, token_id: int) -> int:
        state = self._states[key] = _after(self._states[key], token_id)
        return _pseudonym(state)

    def grow(self, beams: list[Grown]) -> list[int]:
        """The pseudonym of each beam's last token, which follows all tokens of its parent."""
        before = [self._states[beam.parent] if beam.token_index else self._prompts[beam.parent] for beam in beams]
        states = [_after(state, beam.token_id) for state, beam in zip(before, beams, strict=True)]
        self._states.update((beam.key, state) for beam, state in zip(beams, states, strict=True))
        return [_pseudonym(state) for state in states]

    def of_salt(self, salt: str) -> str:
        return _hash(self._begin + salt.encode(errors="surrogatepass")).hex()

    def forget(self, key: Key) -> None:
        self._states.pop(key, None)
        self._prompts.pop(key, None)


def _after(state: bytes, token_id: int) -> bytes:
    return _hash(state + token_id.to_bytes(4, "little", signed=True))


def _pseudonym(state: bytes) -> int:
    return int.from_bytes(state[:4], "little") & 0x7FFFFFFF


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
