"""One simulated pipeline: the real scheduler, prices instead of a model, and a clock driven by them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ...protocol.arrays import Int32
from ...protocol.sampling import SamplingParams
from ...workers.execute.scheduling.cost import Prices, Work
from ...workers.execute.scheduling.plan import Plan
from ...workers.execute.scheduling.progress import Progress
from ...workers.execute.scheduling.scheduler import Scheduler
from ...workers.execute.scheduling.sequence import Key, Sequence
from .measurements import GAP_NS, NS_A_MS, Measurements
from .workload import Arrival

_PARAMS = SamplingParams(max_tokens=None)  # the length of an answer is given by its tokens


@dataclass(slots=True)
class Job:
    """A request on its way through a replica."""

    sequence: Sequence
    at_ns: int  # its arrival
    last_ns: int = 0  # when its last token was produced


class Replica:
    """Requests wait for a credit, then in the scheduler, as in a pipeline; ends are released before the next step."""

    def __init__(self, index: int, scheduler: Scheduler, prices: Prices, seen: Measurements) -> None:
        self.now_ns = 0
        self._index, self._scheduler, self._prices, self._seen = index, scheduler, prices, seen
        self._queue: list[tuple[int, int, Job]] = []  # without a credit; a heap, by urgency and arrival
        self._jobs: dict[Key, Job] = {}  # in the scheduler
        self._ended: list[Key] = []

    @property
    def load(self) -> int:
        """The number of requests that have not ended."""
        return len(self._queue) + len(self._jobs)

    def submit(self, number: int, arrival: Arrival, tokens: Int32) -> None:
        """Request ``number`` arrives. It is refused, as by prepare, if it can never fit."""
        at_ns = round(arrival.at_s * 1e9)
        self._seen.arrived(self._index, at_ns, arrival.num_prompt_tokens)
        room = self._longest - arrival.num_prompt_tokens
        if room <= 0:
            self._seen.counts["refused"] += 1
            return
        if not self.load:
            self.now_ns = max(self.now_ns, at_ns)
        job = Job(_make_sequence(number, arrival, tokens[: arrival.num_prompt_tokens + room], at_ns), at_ns)
        config = self._scheduler.config
        heapq.heappush(self._queue, (number + config.arrivals_per_level * arrival.priority, number, job))

    def step(self) -> None:
        """Plan the next step and advance the clock by its cost."""
        self._release()
        self._give_credits()
        self._scheduler.expire(self.now_ns)
        plan = self._scheduler.plan()
        if plan is None:
            assert not self._scheduler.live, "sequences are live, but nothing was planned"
            return
        begun_ns = self.now_ns
        self._note_starts(plan, begun_ns)
        work = Work.of(plan)
        if plan.chunks:
            self.now_ns += max(1, round(self._prices.of(work) * NS_A_MS))
        running = self._scheduler.running
        token_ids = [int(s.tokens[s.num_tokens]) for s in map(running.__getitem__, plan.sampled)]
        progress = self._scheduler.apply(plan, token_ids)
        self._scheduler.observe(plan, self.now_ns - begun_ns)
        self._take(progress)
        self._count(plan, work, begun_ns)

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence that fits the pool and the model."""
        cache = self._scheduler.cache
        return min(self._scheduler.max_model_len, cache.num_pages * cache.pool.page_size)

    def _release(self) -> None:
        for key in self._ended:
            self._scheduler.release(key)
        self._ended.clear()

    def _give_credits(self) -> None:
        scheduler, max_live = self._scheduler, self._scheduler.config.max_live
        while self._queue and len(scheduler.live) < max_live:
            job = heapq.heappop(self._queue)[-1]
            self._jobs[job.sequence.key] = job
            scheduler.add(job.sequence)

    def _note_starts(self, plan: Plan, begun_ns: int) -> None:
        for key in plan.started:
            job = self._jobs[key]
            if not job.sequence.num_preemptions:
                self._seen.wait_ms.append((begun_ns - job.at_ns) / NS_A_MS)

    def _take(self, progress: Progress) -> None:
        jobs, gaps, now_ns = self._jobs, self._seen.gaps, self.now_ns
        for key, index in zip(progress.keys, progress.token_indices, strict=True):
            job = jobs[key]
            if index:
                gaps[(now_ns - job.last_ns) // GAP_NS] += 1
            else:
                self._seen.ttft_ms.append((now_ns - job.at_ns) / NS_A_MS)
            job.last_ns = now_ns
        for key in progress.finished:
            self._seen.latency_ms.append((now_ns - jobs[key].at_ns) / NS_A_MS)
        for ends, name in (
            (progress.finished, "finished"), (progress.expired, "expired"), (progress.failed, "refused"),
        ):  # fmt: skip
            self._seen.counts[name] += len(ends)
            for key in ends:
                del jobs[key]
                self._ended.append(key)

    def _count(self, plan: Plan, work: Work, begun_ns: int) -> None:
        counts, pool = self._seen.counts, self._scheduler.cache.pool
        counts["steps"] += 1
        counts["decodes"] += work.num_decodes
        counts["prefill_tokens"] += work.num_prefill_tokens
        counts["output_tokens"] += len(plan.sampled)
        counts["pages_held_most"] = max(counts["pages_held_most"], pool.num_held)
        self._seen.busy_ns[self._index] += self.now_ns - begun_ns
        self._seen.last_ns = max(self._seen.last_ns, self.now_ns)

    def close(self) -> None:
        """Add the scheduler's own counters."""
        counts, scheduler = self._seen.counts, self._scheduler
        counts["preemptions"] += scheduler.roster.num_preemptions
        counts["swaps"] += scheduler.roster.num_swaps
        counts["hit_tokens"] += scheduler.cache.num_hit_tokens
        counts["queried_tokens"] += scheduler.cache.num_queried_tokens


def _make_sequence(number: int, arrival: Arrival, tokens: Int32, at_ns: int) -> Sequence:
    return Sequence(
        key=(number, 0),
        tokens=tokens,
        num_prompt_tokens=arrival.num_prompt_tokens,
        num_tokens=arrival.num_prompt_tokens,
        params=_PARAMS,
        seed=0,
        arrival=number,
        cache_salt=arrival.cache_salt,
        deadline_at=_after(at_ns, arrival.deadline_ms),
        queue_deadline_at=_after(at_ns, arrival.max_queue_ms),
        priority=arrival.priority,
    )


def _after(at_ns: int, limit_ms: float | None) -> int:
    return 0 if limit_ms is None else at_ns + round(limit_ms * NS_A_MS)
