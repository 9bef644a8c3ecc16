"""The faults injected into processes, and the time until clients receive the next token or the next ACCEPTED."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from functools import partial

from benchmarks.chaos.chaos_clients import Watch
from benchmarks.chaos.service import Service, wait_for
from triptych.protocol.board import ROLES

RECOVERY_S = 60.0
WEIGHTS = {
    "kill execute": 14, "kill prepare": 7, "kill summarize": 8, "kill a pair": 4, "kill all three": 4,
    "kill driver": 4, "stop one": 3, "segv one": 5, "kill at start-up": 5, "kill during another's recovery": 4,
    "kill fork servers": 4,
}  # fmt: skip


class Faults:
    """One fault after the other, at random moments; only those that hit one process are timed."""

    def __init__(self, service: Service, watch: Watch, *, seed: int, gap_s: float, only: str = "") -> None:
        """``only`` is a part of the names of the faults to inject."""
        self._weights = {kind: weight for kind, weight in WEIGHTS.items() if only in kind}
        self.kinds: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()  # signals sent, by role
        self.recovery_s: dict[str, list[float]] = defaultdict(list)  # until the next token or ACCEPTED
        self.ready_s: dict[str, list[float]] = defaultdict(list)  # the part until the new process was ready
        self.unrecovered = 0
        self._service, self._watch, self._gap_s = service, watch, gap_s
        self._rng = random.Random(seed)

    def run(self, seconds: float, stopping: threading.Event) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not stopping.wait(self._rng.uniform(0.1, 2 * self._gap_s)):
            (kind,) = self._rng.choices(list(self._weights), list(self._weights.values()))
            self.kinds[kind] += 1
            try:
                self._do(kind)
                wait_for(self._service.is_ready, RECOVERY_S, interval_s=0.02)
            except TimeoutError:
                self.unrecovered += 1
                return

    def _do(self, kind: str) -> None:
        role = self._rng.choice(ROLES)
        match kind.split():
            case ["kill", ("execute" | "prepare" | "summarize") as role]:
                self._timed(role, role, signal.SIGKILL)
            case ["kill", "a", "pair"]:
                for one in self._rng.sample(ROLES, 2):
                    self._send(one, signal.SIGKILL)
            case ["kill", "all", "three"]:
                for one in ROLES:
                    self._send(one, signal.SIGKILL)
            case ["kill", "driver"]:
                self._kill_driver()
            case ["stop", "one"]:
                self._timed(f"{role} stopped", role, signal.SIGSTOP)
            case ["segv", "one"]:
                # An external kill in these moments looks like a crash: two of them that hit the same request alone
                # would rightly poison it. No request is alone while there are no suspects and many streams.
                is_safe = not self._service.board.stats()["execute"].get("suspects")
                self._send(role, signal.SIGSEGV if is_safe else signal.SIGKILL)
            case ["kill", "fork", "servers"]:
                self._send(role, signal.SIGKILL)
                time.sleep(self._rng.uniform(0.0, 0.05))  # before, while or after one forks
                self.kills["fork servers"] += self._service.kill_fork_servers()
            case ["kill", "at", "start-up"]:
                self._kill_at_start_up(role)
            case _:
                self._send("execute", signal.SIGKILL)
                time.sleep(self._rng.uniform(0.0, 0.5))
                self._send(self._rng.choice(["prepare", "summarize"]), signal.SIGKILL)

    def _send(self, role: str, number: int) -> bool:
        """Whether there was a process."""
        is_sent = self._service.send(role, number)
        self.kills[role] += is_sent
        return is_sent

    def _send_surely(self, role: str, number: int) -> tuple[dict[str, int], float]:
        """The epochs of all roles before the signal, and when it was sent. For a moment after a crash there is no
        process: without a kill, what is timed would last until the next one happens to crash.
        """
        end = time.monotonic() + RECOVERY_S
        while (began := time.monotonic()) < end:
            before = self._epochs()
            if self._send(role, number):
                return before, began
        raise TimeoutError(f"there was no process of {role} within {RECOVERY_S} s")

    def _timed(self, name: str, role: str, number: int) -> None:
        board = self._service.board
        before, began = self._send_surely(role, number)
        wait_for(lambda: board.epoch(role) > before[role] and board.ready(role), RECOVERY_S, interval_s=0.001)
        ready = time.monotonic()
        seen = "accept_at" if role == "prepare" else "token_at"
        wait_for(lambda: getattr(self._watch, seen) > ready, RECOVERY_S, interval_s=0.001)
        # A poisonous request may crash or hang a worker meanwhile: all clients wait for its end, and nobody submits.
        is_single = sum(self._epochs().values()) == sum(before.values()) + 1
        name = name if is_single else f"{name}, and a worker by itself"
        self.ready_s[name].append(ready - began)
        self.recovery_s[name].append(getattr(self._watch, seen) - began)

    def _epochs(self) -> dict[str, int]:
        return {role: self._service.board.epoch(role) for role in ROLES}

    def _kill_at_start_up(self, role: str) -> None:
        """The first process is killed, and the next one somewhere between its first line and its first step."""
        for _ in range(self._rng.randrange(2, 4)):
            pid = self._service.pid(role)
            self._send(role, signal.SIGKILL)
            wait_for(partial(self._is_replaced, role, pid), RECOVERY_S)
            time.sleep(self._rng.uniform(0.0, 0.6))
        self._send(role, signal.SIGKILL)

    def _is_replaced(self, role: str, pid: int | None) -> bool:
        return self._service.pid(role) not in (None, pid)

    def _kill_driver(self) -> None:
        began = time.monotonic()
        self._service.kill_driver()
        self.kills["driver"] += 1
        self._service.start()
        self._service.wait_ready(RECOVERY_S)
        ready = time.monotonic()
        wait_for(lambda: self._watch.token_at > ready, RECOVERY_S, interval_s=0.001)
        self.ready_s["driver"].append(ready - began)
        self.recovery_s["driver"].append(self._watch.token_at - began)
