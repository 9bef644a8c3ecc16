"""What does recovery cost execute? Prints one JSON line.

The same step loop in one process, in turns without and with everything that recovery adds to a step: the intent before
it, its tokens in the journal and the message about them after it, the progress word for the supervisor. Nobody reads
what is written, so this is the cost of writing alone; ``pipeline_overhead.py`` measures that of three processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_models import make_model
from benchmarks.records import make_record, random_prompts
from benchmarks.report import environment, publish
from benchmarks.sequences import make_engine
from triptych.driver.run_dir import SHARED_MEMORY
from triptych.protocol.board import Board
from triptych.protocol.config import DEMO_CHECKPOINT, PipelineConfig
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import AcceptTimes, RequestWriter, read_request
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.bookkeeping import Bookkeeper
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import Runner
from triptych.workers.execute.step_intent import StepIntent

PROMPT_TOKENS = 64
CASES = {"demo": ((1, 400), (32, 400), (256, 100)), "smollm2-135m": ((1, 64), (32, 32))}  # rows, tokens of each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    results = {}
    for model in arguments.models:
        runner, card, config = load(model)
        for rows, num_tokens in CASES[model]:
            results[f"{model}, {rows} rows"] = compare(runner, card, config, rows, num_tokens, arguments.turns)
    about = environment("torch", "numpy", "msgpack")
    publish({"what": "recovery_overhead", **about, "turns": arguments.turns, "results": results})


def load(model: str) -> tuple[Runner, ModelCard, PipelineConfig]:
    folder = DEMO_CHECKPOINT if model == "demo" else make_model(model)
    config = PipelineConfig.from_options(model=str(folder), device="cpu", max_num_seqs=256, max_model_len=1024)
    with tempfile.TemporaryDirectory() as run_dir:
        runner, card = build_runner(
            config.model, config.cache, config.scheduler, model_dir=folder, run_dir=Path(run_dir),
        )  # fmt: skip
    runner.warm_up()
    return runner, card, config


def compare(
    runner: Runner, card: ModelCard, config: PipelineConfig, rows: int, num_tokens: int, turns: int
) -> dict[str, float]:
    """Medians: microseconds per step for recovery, measured around its calls, and the ratio of throughputs."""
    depth = int(runner.overlaps)
    engine = make_engine(runner, card, config.scheduler, clock=time.monotonic_ns, depth=depth)
    ratios, costs_us = [], []
    for turn in range(-1, turns):  # the first warms up
        order = (True, False) if turn % 2 else (False, True)
        # Different prompts for each run, otherwise the second would find those of the first in the prefix cache.
        runs = {
            is_kept: Run(engine, rows, num_tokens, seed=2 * (turn + 1) + is_kept, is_kept=is_kept) for is_kept in order
        }
        if turn >= 0:
            ratios.append(runs[False].seconds / runs[True].seconds)
            costs_us.append(runs[True].recovery_s / runs[True].num_steps * 1e6)
    return {
        "us_a_step": round(statistics.median(costs_us), 2),
        "throughput_ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


class Run:
    """Equally long requests until their end. Everything kept is what execute keeps; see ``Execute.turn``.

    If steps overlap, so does recovery: it costs less throughput than time.
    """

    def __init__(self, engine: Engine, rows: int, num_tokens: int, *, seed: int, is_kept: bool) -> None:
        self.recovery_s, self.num_steps = 0.0, 0
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
            journal = Journal.create(Path(folder) / "journal", num_records=rows, arena_bytes=64 << 20)
            board = Board(Path(folder) / "board")
            books = Bookkeeper(journal, eos_token_ids=frozenset())
            writer, prompts = RequestWriter(journal), random_prompts(rows, PROMPT_TOKENS, seed)
            sequences = [adopt(books, journal, writer, prompt, num_tokens) for prompt in prompts]
            for sequence in sequences:
                engine.add(sequence)
            began = time.perf_counter()
            if is_kept:
                self._run_kept(engine, board, books)
            else:
                self._run(engine)
            self.seconds = time.perf_counter() - began
            for sequence in sequences:
                engine.release(sequence.key)
                ReleaseWriter(journal).forget(*sequence.key)
            board.close()
            del books
            journal.close()

    def _run(self, engine: Engine) -> None:
        while engine.step() is not None:
            pass

    def _run_kept(self, engine: Engine, board: Board, books: Bookkeeper) -> None:
        intent, page, clock = StepIntent(board.intent("execute")), board.worker("execute"), time.perf_counter
        while engine.has_work:
            while engine.may_plan and (plan := engine.plan()) is not None:
                before = clock()
                page.progress()
                intent.begin(plan, engine.scheduler.rows)
                self.recovery_s += clock() - before
                engine.launch(plan)
            if not engine.num_in_flight:
                return
            outputs = engine.collect()
            before = clock()
            books.record(outputs)
            books.take_rows()
            intent.end()
            self.recovery_s += clock() - before
            self.num_steps += 1


def adopt(books: Bookkeeper, journal: Journal, writer: RequestWriter, prompt: list[int], num_tokens: int) -> Sequence:
    now_ns = time.monotonic_ns()
    slot, generation = writer.accept(make_record(prompt, num_tokens), AcceptTimes(now_ns, now_ns, now_ns, now_ns))
    writer.dispatch(slot, generation, now_ns)
    view = read_request(journal, slot)
    assert view is not None, "a record that was just written"
    return books.adopt(view)


if __name__ == "__main__":
    main()
