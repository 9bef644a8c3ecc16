"""The runner of models on a GPU: steps are launched asynchronously, as graphs where possible.

Sampled tokens also stay on the device, where the next step can take them as input before the host has seen them
(``StepInputs.carried``).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Rows
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from .....protocol.arrays import Int32
from .....protocol.sampling import MAX_LOGPROBS, SamplingParams
from ...attention.device_step import DeviceStep, Taken
from ...grammar.masks import NO_MASKS, PendingMasks
from ...sampling.adjust import adjust_logits
from ...sampling.device import columns, sample
from ...sampling.kinds import SamplingKind, drawing_kind, kind_of
from ...sampling.logprobs import Logprobs, find_logprobs, logprobs_by_row, wanted_logprobs
from ...sampling.sampler import Sampler, failures
from ...scheduling.plan import MAX_SCORED_TOKENS
from ...scheduling.sequence import Sequence
from ...step import StepInputs, StepResult
from ..facts import Progress, no_progress
from ..step_runner import (
    StepRunner,
    trash_checks,
    trash_decodes,
    trash_prefill,
    trash_scores,
    with_adapter,
    with_longest_tables,
)
from .buckets import CHECKED_TOKENS, Router, StepSize, check_sizes, chunk_buckets, num_checked_together
from .buffers import DecodeBuffers, HostStage, upload_ragged
from .check_costs import EXPECTED, measure_check_costs, measure_decode
from .forward import DeviceForward
from .graphs import CaptureFailed, GraphCapture, GraphKey, GraphShelf, Replay
from .mixed_buffers import MixedBuffers

logger = logging.getLogger(__name__)

_SAMPLED_FIRST = (  # in warm-up, besides greedy rows
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.5),
    # The most memory: a second copy of the logits is kept while they are sorted.
    SamplingParams(temperature=1.0, top_p=0.5, logprobs=MAX_LOGPROBS, repetition_penalty=1.1),
)
# Of graphs that consist of decodes.
_KINDS = (SamplingKind.GREEDY, SamplingKind.DRAWN, SamplingKind.CUT, SamplingKind.EDITED)
_NUM_FIRST = 3  # numbers of decodes beside prompts whose graphs are captured at the start: up to 64
_NONE_FAILED: Mapping[int, str] = MappingProxyType({})
_SMALLER = 4  # factor between the prefill sizes of warm-up: no kernel chooses a tile for a narrower range of sizes


class _Pending(NamedTuple):
    """A launched step: what the device writes for the host, and the event that marks its completion."""

    token_ids: torch.Tensor  # int64 [R], pinned
    greatest: torch.Tensor  # float32 [R], pinned
    logprobs: Rows[Logprobs]  # pinned
    failed: Mapping[int, str]  # rows that have no valid token, for a reason that the host knows
    is_done: Any  # torch.cuda.Event | None


class DeviceRunner(StepRunner):
    """Owns the forward function, and through it the pages. Up to two steps may be in flight."""

    def __init__(
        self,
        pools: list[torch.Tensor],
        forward: DeviceForward,
        sampler: Sampler,
        *,
        device: torch.device,
        max_sampled: int,
        max_pages: int,
        capture: GraphCapture | None,
        is_adapted: bool = False,
        max_proposals: int = 0,
        **sizes: int,
    ) -> None:
        """At most ``max_sampled`` rows are sampled in a step without proposals, of which a sequence has at most
        ``max_proposals``; no sequence has more than ``max_pages`` pages.

        Without ``capture`` there are no graphs. ``is_adapted``: steps may use adapters. ``sizes`` are those of
        ``StepRunner``.
        """
        super().__init__(pools, **sizes)
        self.overlaps = device.type == "cuda"
        self._device = device
        self._forward = forward
        self._sampler = sampler
        self._max_pages = max_pages
        self._adapted = (False, True) if is_adapted else (False,)  # whether a step uses adapters: the possible values
        self._stage = HostStage(device, torch.int32)
        self._sampling_stage = HostStage(device, torch.float64)
        self._change_stage, self._logprob_stage = HostStage(device, torch.int32), HostStage(device, torch.int32)
        self._embedded_stage = HostStage(device, torch.int32)
        self._pending: deque[_Pending | StepResult] = deque()
        self._max_proposals = max_proposals
        self.check_costs = EXPECTED if max_proposals else None
        # The tokens of the last step and their greatest logits: static buffers that graphs read and write.
        num_rows = max(max_sampled, self._decode_rows, CHECKED_TOKENS if max_proposals else 0)
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._greatest = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._graphs: GraphShelf | None = None
        if capture is not None:
            checks = check_sizes(self._decode_rows, max_proposals)
            self._router = Router(self._decode_rows, max_pages, chunk_buckets(self._prefill_tokens), checks)
            self._buffers = DecodeBuffers(self._decode_rows, max_pages, device=device)
            sizes_of_chunks = [StepSize(self._decode_rows, self._router.chunk_tokens[-1]), *checks]
            self._mixed_buffers = MixedBuffers(sizes_of_chunks, max_pages, device=device)
            num_logits = max(size.num_sampled for size in sizes_of_chunks)
            self._logits = torch.zeros(num_logits, forward.vocab_size, device=device)
            self._graphs = GraphShelf(capture, self._graph_run, self._clear)
        self.num_steps = 0

    @property
    def num_graph_steps(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_replays

    def warm_up(self) -> float:
        """Do what ``StepRunner.warm_up`` does, and also allocate the most that sampling and scoring need.

        Also run what steps outside of graphs need, since each kernel is compiled or loaded at its first use.
        """
        seconds = super().warm_up()
        if True in self._adapted:
            decodes = trash_decodes(self._decode_rows)
            prefill = trash_prefill(self._prefill_tokens, max_len=self._max_model_len)
            # Few rows and many have kernels of their own.
            each = (prefill, decodes, trash_decodes(1))
            seconds = max(seconds, *(self.seconds_of(with_adapter(inputs)) for inputs in each))
        for inputs in self._rarer_steps():
            self._step(inputs)
        return seconds

    def decode_s(self, num_rows: int) -> float:
        return measure_decode(self, num_rows, max_pages=self._max_pages)

    def _rarer_steps(self) -> Iterator[StepInputs]:
        """Short and long contexts have kernels of their own, and smaller prefills use other tiles of a product."""
        decodes, num_tokens = trash_decodes(self._decode_rows), self._prefill_tokens
        while (num_tokens := num_tokens // _SMALLER) > 1:
            yield trash_prefill(num_tokens, max_len=self._max_model_len)
        for inputs in (decodes, trash_decodes(1), trash_prefill(2)):  # whose keys are split, since they may be many
            yield with_longest_tables(inputs, self._max_pages)
        yield dataclasses.replace(decodes, sample_rows=decodes.sample_rows[:0], sampled=[])
        for params in _SAMPLED_FIRST:
            nobody = dataclasses.replace(decodes.sampled[0], params=params)
            yield dataclasses.replace(decodes, sampled=[nobody] * self._decode_rows)
        if self._max_proposals:
            for num_seqs in (1, num_checked_together(self._decode_rows, self._max_proposals)):
                checks = trash_checks(num_seqs, 1 + self._max_proposals)
                yield checks
                yield with_longest_tables(checks, self._max_pages)
        yield trash_scores(min(self._prefill_tokens, self._max_model_len, MAX_SCORED_TOKENS))

    @torch.inference_mode()
    def capture_graphs(self, progress: Progress = no_progress) -> None:
        """Record the graphs of greedy steps and those of prompts with few decodes, and the largest of other kinds.
        Smaller ones of those are recorded on demand or while idle, and then reuse the memory of the largest; recorded
        by rising size, each would allocate more.

        A model that cannot be recorded runs without graphs. Then measure what proposals cost.
        """
        if self._graphs is not None:
            self._choose_sizes()
            self._capture(self._first_keys(), progress)
        self._measure_checks()

    @torch.inference_mode()
    def prepare(self, seconds: float) -> bool:
        """Record what is missing of the graphs of greedy steps and of prompts, one in a call. After a restart only the
        largest are there.
        """
        if super().prepare(seconds):
            return True
        if self._graphs is None:
            return False
        return self._graphs.capture_next([*self._first_keys(), *self._mixed_keys()])

    @torch.inference_mode()
    def capture_largest(self) -> int:
        """Do what ``StepRunner.capture_largest`` does, for proposals with all graphs, and measure what they cost."""
        num_more = 0
        if self._graphs is not None:
            self._choose_sizes()
            keys, buckets = self._largest_keys(), self._router.buckets
            self._capture(keys, no_progress)
            num_graphs = len(self._keys(buckets, _KINDS)) + len(self._mixed_keys()) + len(self._check_keys())
            num_more = 0 if self._graphs is None else num_graphs - len(keys)
        self._measure_checks()
        return num_more

    def _first_keys(self) -> list[GraphKey]:
        greedy = self._keys(self._router.buckets[:-1], [SamplingKind.GREEDY])
        few = self._router.mixed_rows[:_NUM_FIRST]
        return [*self._largest_keys(), *greedy, *(key for key in self._mixed_keys() if key.size.num_rows in few)]

    def _largest_keys(self) -> list[GraphKey]:
        mixed, buckets = self._mixed_keys()[-len(self._adapted) :], self._router.buckets
        compared = self._keys(buckets[:-1][:1], [SamplingKind.GREEDY]) if self._max_proposals else []
        return [*mixed, *self._check_keys(), *self._keys(buckets[-1:], _KINDS), *compared]

    def _keys(self, buckets: Iterable[int], kinds: Iterable[SamplingKind]) -> list[GraphKey]:
        each = product(buckets, kinds, self._adapted)
        return [GraphKey(StepSize(rows), kind, is_adapted) for rows, kind, is_adapted in each]

    def _mixed_keys(self) -> list[GraphKey]:
        """All keys with tokens of prompts, the largest last. The few launches of the sampling follow their graphs."""
        sizes = product(self._router.chunk_tokens, self._router.mixed_rows, self._adapted)
        return [GraphKey(StepSize(rows, tokens), SamplingKind.HOST, adapted) for tokens, rows, adapted in sizes]

    def _check_keys(self) -> list[GraphKey]:
        """All keys of steps with proposals. Their graphs end with the logits, too."""
        sizes = product(self._router.checks, self._adapted)
        return [GraphKey(size, SamplingKind.HOST, is_adapted) for size, is_adapted in sizes]

    def _measure_checks(self) -> None:
        if self._max_proposals and self._device.type == "cuda":
            sizes = {"max_rows": self._decode_rows, "max_proposals": self._max_proposals, "max_pages": self._max_pages}
            self.check_costs = measure_check_costs(self, **sizes)
            if self._graphs is not None:
                self._graphs.num_replays = 0  # those were nobody's steps

    def _choose_sizes(self) -> None:
        if self._device.type == "cuda":
            self._router.keep_launch_bound(self._launch_share)

    def _launch_share(self, num_tokens: int) -> float:
        """The share of launching in the time of a prefill of so many tokens."""
        step = upload_ragged(trash_prefill(num_tokens, max_len=self._max_model_len), self._stage)
        shares = []
        for _ in range(3):  # the first may compile a kernel
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            self._forward(step, self._resolved(step))
            launched = time.perf_counter()
            torch.cuda.synchronize(self._device)
            shares.append((launched - start) / (time.perf_counter() - start))
        return max(shares[1:])

    def _capture(self, keys: list[GraphKey], progress: Progress) -> None:
        assert self._graphs is not None, "callers check this first"
        try:
            self._graphs.capture_all(keys, progress)
        except CaptureFailed as error:
            logger.warning("steps are launched kernel by kernel, since they cannot be captured: %s", error)
            self._graphs = None

    def launch(self, inputs: StepInputs) -> None:
        self._pending.append(self._start(inputs))
        self.num_steps += 1

    def collect(self) -> StepResult:
        pending = self._pending.popleft()
        if isinstance(pending, StepResult):
            return pending
        if pending.is_done is not None:
            pending.is_done.synchronize()
        failed = {**failures(pending.greatest), **pending.failed}
        logprobs = logprobs_by_row(pending.logprobs, failed=failed)
        return StepResult(pending.token_ids.numpy().astype(np.int32), logprobs, failed)

    @torch.inference_mode()
    def _start(self, inputs: StepInputs) -> _Pending | StepResult:
        kind = SamplingKind.HOST if inputs.scored or inputs.embedded else kind_of(inputs.sampled)
        masks = self._masks.begin(inputs.sampled)
        size = None if self._graphs is None else self._router.size(inputs)
        if size is None:
            step = upload_ragged(inputs, self._stage)
            if inputs.embedded:
                (rows,) = self._embedded_stage.send([inputs.embedded_rows.astype(np.int64)])
                step = step._replace(taken=Taken(rows))
            return self._sample(self._forward(step, self._resolved(step)), inputs, kind, masks, taken=step.taken)
        assert self._graphs is not None, "only a graph has a size"
        is_adapted, num_sampled = inputs.adapters is not None, len(inputs.sampled)
        if size.num_chunk_tokens:
            self._mixed_buffers.fill(inputs, size)
            self._graphs.run(GraphKey(size, SamplingKind.HOST, is_adapted))
            return self._sample(self._logits[:num_sampled], inputs, kind, masks)
        self._buffers.fill(inputs, size.num_rows)
        if kind in (SamplingKind.DRAWN, SamplingKind.CUT):
            table = columns(inputs.sampled, inputs.sampled_lengths, vocab_size=self._forward.vocab_size)
            self._buffers.fill_sampling(table, size.num_rows)
        # If the sampling cannot be part of a graph, the graph ends with the logits.
        self._graphs.run(GraphKey(size, min(kind, SamplingKind.EDITED), is_adapted))
        if kind < SamplingKind.EDITED:
            return self._fetch(num_sampled)
        return self._sample(self._logits[:num_sampled], inputs, kind, masks)

    def _graph_run(self, key: GraphKey) -> Replay:
        """Return the function that a graph of this key records; it works on static buffers only."""
        step = self._static_step(key)
        table = self._buffers.sampling_table(key.size.num_rows)

        def run() -> None:
            logits = self._forward(step, self._resolved(step))
            if key.kind >= SamplingKind.EDITED:
                self._logits[: key.size.num_sampled].copy_(logits)
                return
            sampled = sample(logits, table, key.kind)
            self._tokens[: key.size.num_rows].copy_(sampled.token_ids)
            self._greatest[: key.size.num_rows].copy_(sampled.greatest)

        return run

    def _static_step(self, key: GraphKey) -> DeviceStep:
        if key.size.num_chunk_tokens:
            return self._mixed_buffers.step(key.size, is_adapted=key.is_adapted)
        return self._buffers.step(key.size.num_rows, is_adapted=key.is_adapted)

    def _clear(self, key: GraphKey) -> None:
        if key.size.num_chunk_tokens:
            self._mixed_buffers.clear(key.size)
        else:
            self._buffers.clear()

    def _resolved(self, step: DeviceStep) -> torch.Tensor:
        """Return the step's token ids, with those that only the device knows filled in."""
        carried = self._tokens[step.carried.clamp_min(0).long()]
        return torch.where(step.carried >= 0, carried, step.token_ids.long())

    def _sample(
        self,
        logits: torch.Tensor,
        inputs: StepInputs,
        kind: SamplingKind,
        masks: PendingMasks | None,
        *,
        taken: Taken | None = None,
    ) -> _Pending | StepResult:
        """Sample from logits [R + C, V] what no graph has sampled."""
        count = len(inputs.sampled)
        if kind is SamplingKind.HOST:  # the only kind for which the host waits for a step it has just launched
            result = self._sampler.finish(logits, inputs, masks, hidden=None if taken is None else taken.to_host())
            self._tokens[:count].copy_(torch.from_numpy(result.token_ids))
            return result
        if kind is SamplingKind.EDITED:
            return self._sample_edited(logits, inputs.sampled, inputs.sampled_lengths, masks)
        if count:
            self._choose(logits, inputs.sampled, inputs.sampled_lengths, kind)
        return self._fetch(count)

    def _sample_edited(
        self, logits: torch.Tensor, sequences: Rows[Sequence], lengths: Int32, masks: PendingMasks | None
    ) -> _Pending:
        """Sample from logits [R, V] that the host changes, or whose logprobs it wants."""
        if counts := wanted_logprobs(sequences):
            (rows,) = self._logprob_stage.send([np.array(list(counts), np.int64)])
            raw = logits[rows].log_softmax(dim=-1)
        allowed, failed = NO_MASKS if masks is None else masks.wait()
        adjust_logits(logits, sequences, lengths, self._sampler.eos_token_ids, allowed, send=self._change_stage.send)
        self._choose(logits, sequences, lengths, drawing_kind(sequences))
        logprobs = find_logprobs(raw, self._tokens[rows], counts) if counts else []
        return self._fetch(len(sequences), logprobs, failed)

    def _choose(self, logits: torch.Tensor, sequences: Rows[Sequence], lengths: Int32, kind: SamplingKind) -> None:
        """Choose the next tokens from logits [R, V], and keep them and their logits on the device."""
        count = len(sequences)
        table = self._tokens  # a placeholder for GREEDY, which reads no table
        if kind is not SamplingKind.GREEDY:
            flat = self._sampling_stage.copy([columns(sequences, lengths, vocab_size=logits.shape[1])])
            table = flat.view(-1, count)
        sampled = sample(logits, table, kind)
        self._tokens[:count].copy_(sampled.token_ids)
        self._greatest[:count].copy_(sampled.greatest)

    def _fetch(self, count: int, logprobs: Rows[Logprobs] = (), failed: Mapping[int, str] = _NONE_FAILED) -> _Pending:
        """Start copying the first ``count`` tokens, and logprobs, to the host without waiting."""
        logprobs = [group.moved(self._to_host) for group in logprobs]
        tokens, greatest = (self._to_host(column[:count]) for column in (self._tokens, self._greatest))
        if self._device.type != "cuda":
            return _Pending(tokens, greatest, logprobs, failed, None)
        is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_done.record()
        return _Pending(tokens, greatest, logprobs, failed, is_done)

    def _to_host(self, column: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return column.clone()
        return torch.empty(column.shape, dtype=column.dtype, pin_memory=True).copy_(column, non_blocking=True)
