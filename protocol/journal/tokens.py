"""execute's part of the journal: tokens as they become known, how a request ended, and where its time went."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..messages import FINISH_REASONS, finish_reason
from ..scores import ScoreColumns, pack_scores
from .layout import MAX_CHUNK_ENDS, MAX_ERROR_BYTES, TIME_UNIT_NS, Journal, Slots, split_word, word
from .requests import RequestView, logprob_words

MULTIPLIER = 0x01000193  # odd, so that no token's contribution is ever lost
MASK = 0xFFFFFFFF
SHORT = 32  # below this many tokens a Python loop beats numpy
FEW = 4  # the same threshold for the tokens of one or several steps
_REASON = 0xF  # the bits of a finish_word that hold the reason
_LOST = ("preempted_ns", "recovered_ns", "lost_early_ns")
_SINCE = {"preempted_ns": "preempted_since_ns", "recovered_ns": "recovered_since_ns"}


def check_of(seed: int, tokens: npt.NDArray[np.int32], logprob_rows: npt.NDArray[np.uint32] | None = None) -> int:
    """The polynomial hash ``h = (h + row) * M + token + 1`` modulo 2**32, where ``row`` is the hash of the token's
    logprobs, 0 if it has none. The seed is the generation, plus the hash of the prompt's results once complete.
    """
    values, n = tokens.view(np.uint32) + np.uint32(1), len(tokens)
    if logprob_rows is not None:
        values += logprob_rows @ _row_powers(logprob_rows.shape[1]) * np.uint32(MULTIPLIER)
    if n <= SHORT:
        check = seed
        for value in values.tolist():
            check = check * MULTIPLIER + value & MASK
        return check
    powers = _powers(n)
    return (seed * int(powers[n]) + int(np.sum(values * powers[:n][::-1], dtype=np.uint32))) & MASK


def _powers(n: int) -> npt.NDArray[np.uint32]:
    """MULTIPLIER to the powers 0 to ``n``."""
    powers = np.ones(n + 1, np.uint32)
    np.multiply.accumulate(np.full(n, MULTIPLIER, np.uint32), out=powers[1:])
    return powers


@lru_cache(maxsize=64)  # a width for each number of alternatives
def _row_powers(width: int) -> npt.NDArray[np.uint32]:
    return _powers(width)[1:]


class _Places(NamedTuple):
    """Where the next tokens of some slots go, int64 [n] each; gathered once for as long as a batch stays the same."""

    slots: Slots
    tokens_at: npt.NDArray[np.int64]
    times_at: npt.NDArray[np.int64]
    accepted_at: npt.NDArray[np.int64]


class TokenWriter:
    """Publishes a step's tokens with a few vectorized stores. One per journal, in execute."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        n = journal.num_records
        self._tokens_at = np.zeros(n, np.int64)
        self._times_at = np.zeros(n, np.int64)
        self._checks = np.zeros(n, np.uint32)
        self._accepted_at = np.zeros(n, np.int64)  # in TIME_UNIT_NS
        self._places: _Places | None = None

    def adopt(self, view: RequestView) -> npt.NDArray[np.int32]:
        """Take over a request; returns the tokens it already has (none, or those from before a restart), int32 [n]."""
        slot = view.slot
        emitted = read_tokens(self._journal, view)
        for name in _SINCE.values():
            if self._journal.records[name][slot]:
                self._journal.records[name][slot] = 0
        if emitted is None:
            for name in (*_LOST, "scheduled_ns", "num_cached_tokens", "num_preemptions"):
                self._journal.records[name][slot] = 0
            self._journal.tokens_words[slot] = word(0, view.generation)
            emitted = np.empty(0, np.int32)
        self._tokens_at[slot] = view.extent.tokens_at
        self._times_at[slot] = view.extent.times_at
        self._accepted_at[slot] = view.accepted_ns // TIME_UNIT_NS
        self._checks[slot] = split_word(self._journal.tokens_words[slot])[1]
        self._places = None  # the cached ones may belong to an earlier request
        return emitted

    def publish(
        self, slots: Slots, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32], now_ns: int
    ) -> None:
        """Write one token per slot at its index, then the words that publish them.

        The lookup is skipped for the same ``slots`` array as last time, which must not be modified.
        """
        if len(slots) <= FEW:
            self.publish_in_order(slots, indices, token_ids, now_ns)
            return
        words, places, tokens = self._journal.words, self._places_of(slots), token_ids.view(np.uint32)
        words.put(places.tokens_at + indices, tokens)  # a fifth faster than words[...] = over many pages
        words.put(places.times_at + indices, now_ns // TIME_UNIT_NS - places.accepted_at)
        self._count(slots, indices + 1, self._checks[slots] * MULTIPLIER + tokens + 1)

    def publish_steps(
        self,
        slots: Slots,
        starts: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        times_ns: npt.NDArray[np.int64],
    ) -> None:
        """The same for several steps at once: ``token_ids`` [k, n], step j at its time, from ``starts`` [n] on."""
        num_steps = len(token_ids)
        if num_steps == 1 or token_ids.size <= FEW:  # too few tokens to gain from vectorizing over steps
            for step, now_ns in enumerate(times_ns.tolist()):
                self.publish(slots, starts + step, token_ids[step], now_ns)
            return
        words, places, tokens = self._journal.words, self._places_of(slots), token_ids.view(np.uint32)
        at = starts + np.arange(num_steps)[:, None]
        words.put(places.tokens_at + at, tokens)
        words.put(places.times_at + at, times_ns[:, None] // TIME_UNIT_NS - places.accepted_at)
        powers = _powers(num_steps)
        news = np.sum((tokens + np.uint32(1)) * powers[num_steps - 1 :: -1, None], axis=0, dtype=np.uint32)
        self._count(slots, starts + num_steps, self._checks[slots] * powers[num_steps] + news)

    def _places_of(self, slots: Slots) -> _Places:
        places = self._places
        if places is None or slots is not places.slots:
            places = _Places(slots, self._tokens_at[slots], self._times_at[slots], self._accepted_at[slots])
            self._places = places
        return places

    def _count(self, slots: Slots, counts: npt.NDArray[np.int64], checks: npt.NDArray[np.uint32]) -> None:
        """Write the words that publish ``counts`` tokens of the slots."""
        self._checks[slots] = checks
        self._journal.tokens_words[slots] = counts << 32 | checks

    def publish_in_order(
        self, slots: Slots, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32], now_ns: int
    ) -> None:
        """The same one by one: a slot may occur several times, for consecutive tokens."""
        for slot, index, token in zip(slots.tolist(), indices.tolist(), token_ids.tolist(), strict=True):
            self._publish_one(slot, index, token, now_ns)

    def _publish_one(self, slot: int, index: int, token: int, now_ns: int) -> None:
        words = self._journal.words
        words[int(self._tokens_at[slot]) + index] = token & MASK
        words[int(self._times_at[slot]) + index] = now_ns // TIME_UNIT_NS - int(self._accepted_at[slot]) & MASK
        self._checks[slot] = check = int(self._checks[slot]) * MULTIPLIER + (token & MASK) + 1 & MASK
        self._journal.tokens_words[slot] = (index + 1) << 32 | check

    def publish_all(self, view: RequestView, token_ids: list[int], times_ns: list[int], *, score: float) -> None:
        """Write a whole answer of which nothing was written before: it appears at once or not at all."""
        slot, words = view.slot, self._journal.words
        tokens = np.array(token_ids, np.int32)
        self._journal.records["score"][slot] = score
        words[view.extent.tokens_at : view.extent.tokens_at + len(tokens)] = tokens.view(np.uint32)
        times = np.array(times_ns, np.int64) // TIME_UNIT_NS - self._accepted_at[slot]
        words[view.extent.times_at : view.extent.times_at + len(tokens)] = times
        self._checks[slot] = check_of(int(self._checks[slot]), tokens)
        self._journal.tokens_words[slot] = word(len(tokens), int(self._checks[slot]))

    def clear(self, view: RequestView) -> None:
        """Discard what was written of this request before a restart."""
        self._checks[view.slot] = view.generation
        self._journal.tokens_words[view.slot] = word(0, view.generation)

    def publish_logprobs(self, view: RequestView, index: int, row: npt.NDArray[np.uint32]) -> None:
        """Write the logprobs of the token that is published next (see ``pack_logprobs``)."""
        at = view.extent.logprobs_at + index * len(row)
        self._journal.words[at : at + len(row)] = row
        self._checks[view.slot] = int(self._checks[view.slot]) + int(row @ _row_powers(len(row))) & MASK

    def publish_scores(self, view: RequestView, start: int, scores: ScoreColumns) -> None:
        """Write the prompt's scores from row ``start`` on, before anything of the first token. The last row publishes
        them all.
        """
        rows = pack_scores(scores, view.record.num_prompt_logprobs or 0)
        at = view.extent.scores_at + start * rows.shape[1]
        self._journal.words[at : at + rows.size] = rows.ravel()
        if start + len(rows) == _num_score_rows(view):
            self._publish_results(view)

    def publish_embedding(self, view: RequestView, values: npt.NDArray[np.float32]) -> None:
        """Write the prompt's embedding, float32 [embedding_size]."""
        at = view.extent.scores_at
        self._journal.words[at : at + len(values)] = values.view(np.uint32)
        self._publish_results(view)

    def _publish_results(self, view: RequestView) -> None:
        self._checks[view.slot] = _seed_of(self._journal, view)
        self._journal.tokens_words[view.slot] = word(0, int(self._checks[view.slot]))

    def note_chunks(self, slot: int, ends: Sequence[int]) -> None:
        """Record where the prompt was cut, before its first token is published. Cuts that do not fit are dropped."""
        kept = ends[:MAX_CHUNK_ENDS]
        self._journal.records["chunk_ends"][slot] = [*kept, *[0] * (MAX_CHUNK_ENDS - len(kept))]

    def add_times(self, slot: int, **amounts: int) -> None:
        """Set ``scheduled_ns``, or add to ``preempted_ns``, ``recovered_ns``, ``num_preemptions``, ..."""
        entry = self._journal.records[slot]
        for name, amount in amounts.items():
            entry[name] = amount if name == "scheduled_ns" else int(entry[name]) + amount

    def begin_loss(self, slot: int, field: str, since_ns: int) -> None:
        """From then on, time is lost that will be added to ``preempted_ns`` or ``recovered_ns``."""
        self._journal.records[_SINCE[field]][slot] = since_ns

    def end_loss(self, slot: int, field: str, lost_ns: int) -> None:
        """The request goes on, or has ended; so much was lost."""
        self._journal.records[_SINCE[field]][slot] = 0
        self.add_times(slot, **{field: lost_ns})

    def note_lost_early(self, slot: int) -> None:
        """All time lost so far was lost before the first token."""
        entry = self._journal.records[slot]
        entry["lost_early_ns"] = int(entry["preempted_ns"]) + int(entry["recovered_ns"])

    def finish(self, slot: int, generation: int, reason: str, error: str = "") -> None:
        """Publish that no token follows; ``error`` is cut to 104 bytes."""
        kept = error.encode()[:MAX_ERROR_BYTES].decode(errors="ignore").encode()  # not half a character
        self._journal.records["error"][slot] = kept
        check = _finish_check(self._journal.tokens_words[slot], kept)
        self._journal.finish_words[slot] = word(generation, check | FINISH_REASONS.index(reason))


class TokenTimes(NamedTuple):
    """Times of one request as execute recorded them."""

    tokens_ns: npt.NDArray[np.int64]  # [n], of the journal's clock
    scheduled_ns: int
    preempted_ns: int
    recovered_ns: int
    lost_early_ns: int  # the part of both before the first token
    num_cached_tokens: int
    num_preemptions: int
    preempted_since_ns: int  # of a preemption in progress; 0: there is none
    recovered_since_ns: int  # likewise of what a crash interrupted

    def until(self, now_ns: int) -> TokenTimes:
        """With the loss in progress, of a request that ended during it or may still go on."""
        preempted_ns, recovered_ns = (
            max(0, now_ns - since_ns) if since_ns else 0
            for since_ns in (self.preempted_since_ns, self.recovered_since_ns)
        )
        return self._replace(
            preempted_ns=self.preempted_ns + preempted_ns,
            recovered_ns=self.recovered_ns + recovered_ns,
            lost_early_ns=self.lost_early_ns + (0 if len(self.tokens_ns) else preempted_ns + recovered_ns),
        )


def read_tokens(journal: Journal, view: RequestView) -> npt.NDArray[np.int32] | None:
    """The published tokens, int32 [n]; None if there are none of this generation (or one is being written, or their
    logprobs or the results of the prompt are damaged).
    """
    count, check = split_word(journal.tokens_words[view.slot])
    if count > view.record.token_capacity:
        return None
    at, logprobs = view.extent.tokens_at, None
    tokens = journal.words[at : at + count].view(np.int32).copy()
    if view.record.num_logprobs is not None:
        logprobs = _logprob_rows(journal, view, 0, count)
    seed = view.generation
    if view.record.asks_about_prompt and (count > 0 or check != seed):
        seed = _seed_of(journal, view)
    return tokens if check_of(seed, tokens, logprobs) == check else None


def read_chunk_ends(journal: Journal, slot: int) -> list[int]:
    """Where the prompt of a request that has tokens was cut, as far as recorded."""
    ends = journal.records["chunk_ends"][slot]
    return [int(end) for end in ends if end]


def read_finish(journal: Journal, slot: int, generation: int) -> tuple[str, str] | None:
    """``(finish reason, error)`` if execute finished this request, else None; None too while the error, or the word of
    its last tokens, is not visible yet.
    """
    current, value = split_word(journal.finish_words[slot])
    error = bytes(journal.records["error"][slot])
    if current != generation or value & ~_REASON != _finish_check(journal.tokens_words[slot], error):
        return None
    return finish_reason(value & _REASON), error.decode(errors="replace")


def _finish_check(tokens_word: np.uint64, error: bytes) -> int:
    """What the end of a request comes with, as the upper 28 of 32 bits."""
    return zlib.crc32(error, zlib.crc32(tokens_word.tobytes())) & ~_REASON


def read_times(journal: Journal, view: RequestView, num_tokens: int) -> TokenTimes:
    if num_tokens == 0 and read_tokens(journal, view) is None:  # these fields still belong to an earlier request
        return TokenTimes(np.empty(0, np.int64), 0, 0, 0, 0, 0, 0, 0, 0)
    entry = journal.records[view.slot]
    at = view.extent.times_at
    scheduled_ns, accepted_at = int(entry["scheduled_ns"]), view.accepted_ns // TIME_UNIT_NS
    least = max(0, scheduled_ns // TIME_UNIT_NS - accepted_at)
    return TokenTimes(
        (accepted_at + _unwrapped(journal.words[at : at + num_tokens], least)) * TIME_UNIT_NS,
        scheduled_ns,
        int(entry["preempted_ns"]),
        int(entry["recovered_ns"]),
        int(entry["lost_early_ns"]),
        int(entry["num_cached_tokens"]),
        int(entry["num_preemptions"]),
        int(entry["preempted_since_ns"]),
        int(entry["recovered_since_ns"]),
    )


def _unwrapped(units: npt.NDArray[np.uint32], least: int) -> npt.NDArray[np.int64]:
    """Undo the cut to 32 bits, about twelve hours: no time is before ``least`` or before its predecessor."""
    later = units.astype(np.int64)
    later[1:] -= units[:-1]
    later[:1] -= least
    return least + np.cumsum(later & MASK)


def was_scheduled(journal: Journal, slot: int, accepted_ns: int) -> bool:
    """Whether a step of the request in ``slot``, accepted at ``accepted_ns``, has started."""
    # The stored time may still be that of an earlier request in this slot.
    return int(journal.records["scheduled_ns"][slot]) >= accepted_ns


def pack_logprobs(
    chosen: float, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], num_alternatives: int
) -> npt.NDArray[np.uint32]:
    """uint32 [1 + 2 * num_alternatives]: the chosen token's logprob, then pairs of id and logprob, padded with -1."""
    row = np.full(1 + 2 * num_alternatives, MASK, np.uint32)
    row[:1] = np.array([chosen], np.float32).view(np.uint32)
    n = min(len(token_ids), num_alternatives)
    row[1 : 1 + 2 * n : 2] = token_ids[:n].astype(np.int32).view(np.uint32)
    row[2 : 2 + 2 * n : 2] = logprobs[:n].astype(np.float32).view(np.uint32)
    return row


def read_logprobs(journal: Journal, view: RequestView, start: int, stop: int) -> list[list[float | list[list[float]]]]:
    """``[[chosen logprob, [[token id, logprob], ...]], ...]`` for output tokens ``start`` to ``stop``."""
    rows = _logprob_rows(journal, view, start, stop)
    width = rows.shape[1]
    ids, values = rows.view(np.int32), rows.view(np.float32)
    return [
        [float(values[i, 0]), [[int(ids[i, j]), float(values[i, j + 1])] for j in range(1, width, 2) if ids[i, j] >= 0]]
        for i in range(len(rows))
    ]


def _logprob_rows(journal: Journal, view: RequestView, start: int, stop: int) -> npt.NDArray[np.uint32]:
    width = logprob_words(view.record.num_logprobs)
    at = view.extent.logprobs_at
    return journal.words[at + start * width : at + stop * width].reshape(-1, width)


def prompt_words(journal: Journal, view: RequestView) -> npt.NDArray[np.uint32]:
    """What is computed about the prompt itself, a view; whether it is complete is known by ``has_prompt_results``."""
    at = view.extent.scores_at
    return journal.words[at : at + view.record.num_prompt_words]


def _seed_of(journal: Journal, view: RequestView) -> int:
    """The seed of ``check_of`` for a request whose prompt's results are complete."""
    words = prompt_words(journal, view)
    return view.generation + int(words @ _powers(len(words))[1:]) & MASK


def _num_score_rows(view: RequestView) -> int:
    return view.record.num_prompt_tokens - 1
