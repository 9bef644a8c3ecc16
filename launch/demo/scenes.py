"""What the demo shows: three processes, eight questions at once, and a kill -9 that no client notices."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from ...driver.driver import Driver
from ...driver.stream import Completion
from ...protocol.config import DEMO_MODEL, HASH_MODEL
from ...protocol.errors import TriptychError
from ..demo_model.entries import load_entries
from ..signals import INTERRUPTED, exit_on_signals, signals_ignored
from ..terminal.demo_view import WIDTH, Row, block, show_answers
from ..terminal.failures import explain
from ..terminal.logs import set_up_logging
from ..terminal.report import duration, ledger_table, model_line, number, say
from ..terminal.startup import start

QUESTIONS = {
    "What does range do?": "range",
    "help(getattr)": "getattr",
    "Explain iter.": "iter",
    "What is map?": "map",
    "Tell me about str.split.": "str.split",
    "How does sorted work?": "sorted",
    "Describe dict.get.": "dict.get",
    "zip?": "zip",
}
REST_S = 5.0  # within which all pages are at rest after the last answer
KILL_TRIES = 3  # an answer may be complete before the signal arrives
NEXT_STEPS = """\
Continue with

  .venv/bin/triptych chat
  .venv/bin/triptych generate "What does enumerate do?"
  make test

or serve other processes:

  .venv/bin/triptych serve --run-dir /tmp/triptych

  from triptych import Client
  with Client("/tmp/triptych") as client:
      for delta in client.submit(messages=[{"role": "user", "content": "What does zip do?"}]):
          print(delta.text, end="", flush=True)
"""


class Demo:
    """The scenes, in order. ``problems`` lists everything that went wrong."""

    def __init__(self, driver: Driver, console: Console) -> None:
        self.driver, self.console = driver, console
        self._answers: dict[str, Completion] = {}
        self.problems: list[str] = []

    def run(self) -> None:
        for title, scene in (
            ("Three processes", self.start),
            (f"{len(QUESTIONS)} questions at once", self.ask),
            ("Where the time went", self.account),
            ("kill -9", self.kill),
            ("Afterwards", self.count),
        ):
            self.console.print(f"[bold]{title}[/]\n")
            scene()

    def start(self) -> None:
        startup = start(self.driver, self.console, say=self._say)
        for line in startup.account(self.driver.pids):
            self._say(line)
        self._say(model_line(self.driver.info()["model"]) + "\n")

    def ask(self) -> None:
        now = time.monotonic()
        rows = [Row(question, self.driver.submit(messages=_chat(question)), now) for question in QUESTIONS]
        self._answers = dict(zip(QUESTIONS, show_answers(rows, self.console), strict=True))
        elapsed_s = time.monotonic() - now
        num_tokens = sum(answer.usage["completion_tokens"] for answer in self._answers.values())
        self._say(f"{num_tokens} tokens in {elapsed_s:.2f} s, {number(num_tokens / elapsed_s)} tok/s together")
        if self.driver.config.model.model == DEMO_MODEL:
            known = dict(load_entries())
            exact = [q for q, name in QUESTIONS.items() if self._answers[q].text == known[name]]
            self._say(f"{len(exact)} of {len(QUESTIONS)} answers are Python's own documentation, to the letter\n")
            self._require(len(exact) == len(QUESTIONS), "an answer differs from Python's documentation")

    def account(self) -> None:
        """The ledgers, whose stages must add up to the wall time."""
        ledgers = {name: self._answers[question].ledger for question, name in QUESTIONS.items()}
        self.console.print(ledger_table({name.rpartition(".")[2]: ledger for name, ledger in ledgers.items()}))
        for name, ledger in ledgers.items():
            gap_ms = abs(sum(ledger["stages_ms"].values()) - ledger["wall_ms"])
            self._require(gap_ms <= 0.02 * ledger["wall_ms"], f"the ledger of {name} does not add up: {gap_ms} ms")

    def kill(self) -> None:
        """Kill execute in the middle of the longest answer, and compare that with the undisturbed one."""
        question = max(self._answers, key=lambda q: len(self._answers[q].token_ids))
        for _ in range(KILL_TRIES):
            again = self._ask_and_kill(question, num_tokens=len(self._answers[question].token_ids) // 5)
            if again.ledger["stages_ms"]["recovered"] > 0:
                break
        recovered_ms = again.ledger["stages_ms"]["recovered"]
        identical = again.token_ids == self._answers[question].token_ids
        self._require(recovered_ms > 0, "execute was never killed in the middle of an answer")
        self._require(identical, f"the answer after the kill differs: {again.text}")
        if identical:
            self._say(f"The answer is identical to the first one. The recovery took {duration(recovered_ms)} of it.\n")

    def _ask_and_kill(self, question: str, *, num_tokens: int) -> Completion:
        """Kill execute as soon as ``num_tokens`` tokens of the answer have arrived."""
        self._say(question)
        stream = self.driver.submit(messages=_chat(question))
        before = ""
        for delta in stream:
            before += delta.text
            if delta.num_tokens >= num_tokens:
                break
        pid = self.driver.pids["execute"]
        assert pid is not None, "execute has just sent a token"
        os.kill(pid, signal.SIGKILL)
        self._say(f"{block(before + ' ...', self.console)}\nkilling execute (pid {pid}) ... the answer continues")
        with self.console.status("a new execute loads the model and reads the journal"):
            completion = stream.result()
        self._say(f"{block('...' + completion.text[len(before) :], self.console)}\n")
        return completion

    def count(self) -> None:
        """Every page is free again, or holds a cached prefix; and the three processes are alive."""
        idle = self._poll(lambda stats: _num_at_rest(stats["execute"]) == stats["execute"]["pages"])
        execute, pids = idle["execute"], self.driver.pids
        self._say(
            f"pages: {execute['pages_free']} of {execute['pages']} free,"
            f" {execute['pages_cached']} cached, {execute['pages_lost']} lost"
        )
        restarts = ", ".join(f"{role} {count}" for role, count in idle["restarts"].items())
        self._say(f"processes: {', '.join(f'{role} {pid}' for role, pid in pids.items())}")
        self._say(f"restarts: {restarts}\n")
        self._require(_num_at_rest(execute) == execute["pages"], "pages are missing")
        self._require(None not in pids.values(), "a process is missing")

    def _poll(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + REST_S
        while not condition(stats := self.driver.stats()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return stats

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def _say(self, text: str) -> None:
        say(self.console, text, "none")


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _num_at_rest(execute: dict[str, Any]) -> int:
    return int(execute["pages_free"]) + int(execute["pages_cached"])


def make_demo() -> Demo:
    """The demo of the model that the command line names."""
    parser = argparse.ArgumentParser(description="Shows the pipeline at work, in less than half a minute.")
    parser.add_argument("--model", default=DEMO_MODEL)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    set_up_logging("warning", console)
    model = parser.parse_args().model
    return Demo(Driver(model, hash_step_ms=5.0 if model == HASH_MODEL else 0.0), console)


def play(demo: Demo) -> int:
    """Run the demo and say how it went; returns the exit code."""
    exit_on_signals()
    try:
        demo.run()
    except TriptychError as error:
        demo.problems.append(explain(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        with signals_ignored():
            demo.driver.stop(mode="abort")
    for problem in demo.problems:
        say(demo.console, f"wrong: {problem}", "red")
    if not demo.problems:
        say(demo.console, NEXT_STEPS, "none")
    return 1 if demo.problems else 0
