"""Records each step: tokens, ends and times in the journal, and rows for summarize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocol.errors import DeadlineExceeded, ModelFailed
from ...protocol.journal.layout import DISPATCHED, Journal, Slots, split_word
from ...protocol.journal.prompt_results import has_prompt_results
from ...protocol.journal.requests import RequestView, read_request, slots_of_group
from ...protocol.journal.tokens import (
    TokenTimes,
    TokenWriter,
    pack_logprobs,
    read_chunk_ends,
    read_finish,
    read_times,
    read_tokens,
    was_scheduled,
)
from ...protocol.messages import FINISH_REASONS
from .engine import StepOutputs
from .reports import StepRows
from .scheduling.plan import Plan
from .scheduling.pooling import LAST_STATE, Pooling
from .scheduling.progress import Progress
from .scheduling.sequence import Key, Sequence

NO_TOKEN = 0xFFFFFFFF  # index of a row without a token, which only reports how its request ended


class _Interruption(NamedTuple):
    field: str  # of the journal, to which its duration is added
    since_ns: int


class _Columns(NamedTuple):
    """A step's keys as arrays, which are kept from step to step, as batches rarely change."""

    keys: list[Key]
    slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class _Unwritten(NamedTuple):
    """Completed steps of the same sequences, one token of each, that are not in the journal yet.

    Only what will be written is kept: whole outputs, for a hundred steps, are objects that each search for garbage
    visits, in memory that the next step could have used again.
    """

    keys: list[Key]
    starts: list[int]  # index of the first token of each
    token_ids: list[int]  # step by step
    times_ns: list[int]  # of each step

    def append(self, outputs: StepOutputs) -> None:
        self.token_ids.extend(outputs.progress.token_ids)
        self.times_ns.append(outputs.collected_at)


class Bookkeeper:
    """Turns requests into sequences, and the engine's outputs into journal entries and rows of messages."""

    def __init__(
        self,
        journal: Journal,
        *,
        eos_token_ids: frozenset[int],
        adapters: Mapping[str, int] | None = None,
        pooling: Pooling = LAST_STATE,
    ) -> None:
        """``adapters`` has the number of each served adapter by name, and may change. ``pooling`` is that of the
        model's embeddings.
        """
        self._journal = journal
        self._pooling = pooling
        self._writer = TokenWriter(journal)
        self._eos = eos_token_ids
        self._adapters = {} if adapters is None else adapters
        self._views: dict[Key, RequestView] = {}
        self._sequences: dict[Key, Sequence] = {}
        self._interruptions: dict[Key, _Interruption] = {}
        self._search_times: dict[Key, list[int]] = {}  # of each step of a beam search, by group key
        self._columns = _columns([])
        self._unwritten: _Unwritten | None = None
        self._rows: list[StepRows] = []  # written, but not taken yet

    def adopt(self, view: RequestView) -> Sequence:
        """The sequence of a request, with any output tokens that it has from before a restart."""
        key, record, emitted = view.key, view.record, self._writer.adopt(view)
        if record.params.is_beam_search and not self._has_ended(view):
            self._writer.clear(view)
            emitted = emitted[:0]
        params = replace(record.params, logprobs=record.num_logprobs, prompt_logprobs=record.num_prompt_logprobs)
        prompt = record.prompt_ids
        tokens = np.zeros(len(prompt) + record.token_capacity, np.int32)
        tokens[: len(prompt)] = prompt
        tokens[len(prompt) : len(prompt) + len(emitted)] = emitted
        self._views[key] = view
        times = read_times(self._journal, view, len(emitted))
        self._note_recovery(key, times)
        sequence = Sequence(
            key=key,
            tokens=tokens,
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt) + len(emitted),
            params=params,
            seed=record.seed,
            arrival=view.arrival,
            group_key=view.group if params.group_size > 1 else None,
            accepted_at=view.accepted_ns,
            cache_salt=record.prefix_salt,
            adapter=self._adapters.get(record.lora, 0),
            deadline_at=record.deadline_at,
            queue_deadline_at=0 if self._has_begun(view) else record.queue_deadline_at,  # met before the restart
            priority=record.priority,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
            final_ids=self._eos if record.grammar else frozenset(),
            embedding_size=record.embedding_size,
            pooling=self._pooling,
        )
        if has_prompt_results(self._journal, view):
            sequence.num_scored_tokens, sequence.embedding_size = len(prompt), 0
        if len(emitted):
            sequence.chunk_ends = read_chunk_ends(self._journal, view.slot)
        self._sequences[key] = sequence
        return sequence

    def _has_begun(self, view: RequestView) -> bool:
        """Whether a step of this request, with any of its sequences, has started."""
        is_alone = view.record.params.group_size == 1
        slots = [view.slot] if is_alone else slots_of_group(self._journal, view.group)
        return any(was_scheduled(self._journal, slot, view.accepted_ns) for slot in slots)

    def _has_ended(self, view: RequestView) -> bool:
        """Whether all hypotheses of a search are written, as that of its last record is written last."""
        slot, generation = view.group
        last = read_request(self._journal, slot)
        tokens = None if last is None or last.generation != generation else read_tokens(self._journal, last)
        return tokens is not None and len(tokens) > 0

    def finish(self, key: Key, reason: str, error: str = "") -> None:
        """Record an end that is not the result of a step."""
        self._writer.finish(*key, reason, error)

    def put_back(self, key: Key) -> None:
        """Forget a request that will be adopted again and continue."""
        self.write()
        self._views.pop(key, None)
        if (sequence := self._sequences.pop(key, None)) is not None and sequence.group_key is not None:
            self._search_times.pop(sequence.group_key, None)
        self._interruptions.pop(key, None)

    def fail(self, key: Key, why: str) -> None:
        """``finish`` for a request that could not start."""
        self.finish(key, "error", f"{ModelFailed.code}\n{why}")

    def drop(self, key: Key) -> None:
        """Write nothing more for this request: its record may be reused. It ends as aborted if it has no end yet."""
        self.put_back(key)
        if read_finish(self._journal, *key) is None:
            self._writer.finish(*key, "abort")

    def drop_others(self, slots: Slots) -> None:
        """``drop`` for those of ``slots`` that were released before this process adopted them."""
        journal = self._journal
        generations = journal.generations(slots)  # first: a record reused in the meantime belongs to another request
        ended = (journal.states(slots) == DISPATCHED) & (journal.release_states(slots) != 0)
        ended &= journal.finish_words[slots] >> np.uint64(32) != generations
        for key in zip(slots[ended].tolist(), generations[ended].tolist(), strict=True):
            if key not in self._views:
                self._writer.finish(*key, "abort")

    @property
    def num_unwritten(self) -> int:
        """Completed steps of which nothing is in the journal yet."""
        return 0 if self._unwritten is None else len(self._unwritten.times_ns)

    def record(self, outputs: StepOutputs) -> None:
        """Record a step. One that yielded only tokens, for the same rows as the previous step, is written together with
        the following ones: by ``write``, or before anything else is written.
        """
        if self._is_plain(outputs):
            progress = outputs.progress
            if self._unwritten is not None and progress.keys != self._unwritten.keys:
                self.write()
            if self._unwritten is None:
                self._unwritten = _Unwritten(progress.keys, progress.token_indices, [], [])
            self._unwritten.append(outputs)
        else:
            self.write()
            self._write_step(outputs)

    def _is_plain(self, outputs: StepOutputs) -> bool:
        plan, progress = outputs.plan, outputs.progress
        has_others = len(plan.chunks) > plan.num_decodes or plan.starts or plan.preempted or self._interruptions
        has_ends = progress.finished or progress.expired or progress.failed
        has_more = outputs.logprobs or outputs.scores or outputs.embeddings or progress.choices
        return bool(progress.keys) and not (has_others or has_ends or has_more)

    def take_rows(self) -> list[StepRows]:
        """The rows to report to summarize for the steps since the last call; all of them are in the journal."""
        self.write()
        rows, self._rows = self._rows, []
        return rows

    def write(self) -> None:
        """Write the steps that are not in the journal yet."""
        if self._unwritten is None:
            return
        steps, self._unwritten = self._unwritten, None
        slots, generations = self._columns_of(steps.keys)
        starts, k = np.array(steps.starts, np.int64), len(steps.times_ns)
        token_ids = np.array(steps.token_ids, np.int32).reshape(k, -1)
        times_ns = np.array(steps.times_ns, np.int64)
        self._writer.publish_steps(slots, starts, token_ids, times_ns)
        rows = StepRows(
            slots.repeat(k),
            generations.repeat(k),
            (starts[:, None] + np.arange(k)).ravel(),
            token_ids.T.ravel(),
            bytes(token_ids.size),
        )
        self._rows.append(rows)

    def _write_step(self, outputs: StepOutputs) -> None:
        plan, progress = outputs.plan, outputs.progress
        self._note_schedule(outputs)
        self._note_chunks(outputs.plan)
        for key, scores in outputs.scores.items():
            if key in self._views:
                self._writer.publish_scores(self._views[key], scores.start, scores.columns)
        for key, embedding in outputs.embeddings.items():
            if key in self._views:
                self._writer.publish_embedding(self._views[key], embedding)
        if outputs.logprobs:
            self._write_logprobs(outputs)
        slots, _ = self._columns_of(progress.keys)
        indices = np.array(progress.token_indices, np.int64)
        token_ids = np.array(progress.token_ids, np.int32)
        if len(token_ids):
            publish = self._writer.publish_in_order if plan.has_proposals else self._writer.publish
            publish(slots, indices, token_ids, outputs.collected_at)
        self._note_searches(outputs)
        for key, found in progress.hypotheses.items():  # in record order, so that the last record is written last
            times_ns = self._times_of(key, len(found.tokens), outputs.collected_at)
            self._writer.publish_all(self._views[key], found.tokens, times_ns, score=found.score)
        ends = self._write_ends(outputs)
        if len(token_ids) or ends:
            self._rows.append(self._rows_of(indices, token_ids, ends))

    def _columns_of(self, keys: list[Key]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if keys != self._columns.keys:
            self._columns = _columns(keys)
        return self._columns.slots, self._columns.generations

    def _note_recovery(self, key: Key, times: TokenTimes) -> None:
        """Note that a request that ran before was interrupted by a crash, from its last token or its scheduling on.

        A search that starts over has lost its output tokens, and may have been interrupted this way before.
        """
        if len(times.tokens_ns):
            self._interrupt(key, "recovered_ns", int(times.tokens_ns[-1]))
        elif times.scheduled_ns:
            self._interrupt(key, "recovered_ns", times.scheduled_ns + times.recovered_ns)

    def _interrupt(self, key: Key, field: str, since_ns: int) -> None:
        if key not in self._interruptions:
            self._interruptions[key] = _Interruption(field, since_ns)
            self._writer.begin_loss(key[0], field, since_ns)

    def _note_searches(self, outputs: StepOutputs) -> None:
        """Note when each search took this step, one token per beam. A search that starts over begins at token 0."""
        for search, choice in outputs.progress.choices.items():
            times_ns = self._search_times.setdefault(search, [])
            if choice.beams:
                del times_ns[choice.beams[0].token_index :]
            times_ns.append(outputs.collected_at)

    def _times_of(self, key: Key, num_tokens: int, now_ns: int) -> list[int]:
        """When the tokens of a hypothesis were computed; the last one is dated to the end of the search."""
        times_ns = self._search_times.get(self._sequences[key].group_key or key, [])[: max(num_tokens - 1, 0)]
        return times_ns + [now_ns] * (num_tokens - len(times_ns))

    def _note_schedule(self, outputs: StepOutputs) -> None:
        for first, num_cached_tokens in outputs.plan.starts:
            for key in self._started_together(first):
                if key in self._views and not self._journal.records["scheduled_ns"][key[0]]:
                    times = {"scheduled_ns": outputs.launched_at, "num_cached_tokens": num_cached_tokens}
                    self._writer.add_times(key[0], **times)
        for key in self._views.keys() & outputs.plan.preempted:
            self._writer.add_times(key[0], num_preemptions=1)
            self._interrupt(key, "preempted_ns", outputs.launched_at)
        for key in self._continuing(outputs.progress) if self._interruptions else ():
            interruption = self._interruptions.pop(key)
            lost_ns = max(0, outputs.collected_at - interruption.since_ns)  # a torn record may hold a future time
            self._writer.end_loss(key[0], interruption.field, lost_ns)
            if not self._has_token(key, outputs.progress):
                self._writer.note_lost_early(key[0])

    def _continuing(self, progress: Progress) -> list[Key]:
        """Interrupted requests that got a token, whose search took a step, or that ended."""
        seen = {*progress.keys, *progress.finished, *progress.expired, *progress.failed}
        return [
            key
            for key in self._interruptions
            if key in seen or (self._sequences[key].group_key or key) in progress.choices
        ]

    def _has_token(self, key: Key, progress: Progress) -> bool:
        """Whether its first token is from an earlier step; a search that starts over with this step has none."""
        search = self._sequences[key].group_key or key
        if (choice := progress.choices.get(search)) is not None:
            begins = bool(choice.beams) and choice.beams[0].token_index == 0
            return bool(self._search_times.get(search)) and not begins
        count, _ = split_word(self._journal.tokens_words[key[0]])
        return count > 0

    def _started_together(self, key: Key) -> list[Key]:
        """The requests that start along with ``key``: all beams of a search, as the first one computes their prompt."""
        sequence = self._sequences.get(key)
        if sequence is None or not sequence.is_beam:
            return [key]
        return [other.key for other in self._sequences.values() if other.group_key == sequence.group_key]

    def _note_chunks(self, plan: Plan) -> None:
        for chunk in plan.prefills:
            sequence = self._sequences.get(chunk.key)
            if chunk.samples and sequence is not None and sequence.replays and sequence.num_output_tokens <= 1:
                self._writer.note_chunks(chunk.key[0], sequence.chunk_ends)

    def _write_logprobs(self, outputs: StepOutputs) -> None:
        indices = dict(zip(outputs.progress.keys, outputs.progress.token_indices, strict=True))
        for key, logprobs in outputs.logprobs.items():
            if key in indices:
                view = self._views[key]
                row = pack_logprobs(*logprobs, num_alternatives=view.record.num_logprobs or 0)
                self._writer.publish_logprobs(view, indices[key], row)

    def _write_ends(self, outputs: StepOutputs) -> dict[Key, str]:
        progress = outputs.progress
        ends = {key: (reason, "") for key, reason in progress.finished.items()}
        for error, ended in ((DeadlineExceeded, progress.expired), (ModelFailed, progress.failed)):
            ends |= {key: ("error", f"{error.code}\n{why}") for key, why in ended.items()}
        # A request dropped since the step was planned has its end, and its record may belong to another by now.
        ends = {key: end for key, end in ends.items() if key in self._views}
        for key, end in ends.items():
            self._writer.finish(*key, *end)
        return {key: reason for key, (reason, _) in ends.items()}

    def _rows_of(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32], ends: dict[Key, str]
    ) -> StepRows:
        columns = self._columns
        last_rows = {key: row for row, key in enumerate(columns.keys)} if ends else {}
        if silent := [key for key in ends if key not in last_rows]:
            last_rows |= {key: row for row, key in enumerate(silent, start=len(columns.keys))}
            columns = _columns(columns.keys + silent)
            indices = np.append(indices, np.full(len(silent), NO_TOKEN))
            token_ids = np.append(token_ids, np.zeros(len(silent), np.int32))
        reasons = bytearray(len(token_ids))
        for key, reason in ends.items():
            reasons[last_rows[key]] = FINISH_REASONS.index(reason)
        return StepRows(columns.slots, columns.generations, indices, token_ids, bytes(reasons))


def _columns(keys: list[Key]) -> _Columns:
    slots, generations = np.array(keys, np.int64).reshape(-1, 2).T
    return _Columns(list(keys), np.ascontiguousarray(slots), np.ascontiguousarray(generations))
