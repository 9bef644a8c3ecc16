"""Clients that know their expected answers: readers, some of which abort, vanish, take over from each other, or send
invalid requests.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from triptych import Client
from triptych.driver.stream import Stream
from triptych.protocol.errors import (
    InvalidRequest,
    ModelFailed,
    Overloaded,
    PipelineClosed,
    Poisoned,
    RequestError,
    TriptychError,
)
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens, hidden_of, state_of

ANSWER_S = 180.0  # a request without an answer for this long is lost
LEASE_S, VANISHED_LEASE_S = 60.0, 2.0
SPARE = 257  # see tests/pipeline/faults
POISONS = {1: ModelFailed, 2: Poisoned, 3: Poisoned, 4: Poisoned, 5: ModelFailed, 6: Poisoned, 7: ModelFailed}
INVALID: list[dict[str, Any]] = [
    {"temperature": -1.0}, {"max_tokens": -5}, {"top_p": 2.0}, {"nonsense": 1}, {"stop": [""] * 99}, {"seed": "x"},
    {"logit_bias": {99_999_999: 1.0}}, {"n": 10**9},
]  # fmt: skip


class Oracle(Protocol):
    """Requests, and their undisturbed answers."""

    can_poison_execute: bool

    def embedding(self, prompt: list[int]) -> npt.NDArray[np.float32] | None:
        """The embedding of a prompt; None if it is not known."""
        ...

    def draw(self, rng: random.Random) -> tuple[dict[str, Any], list[int]]: ...


class HashOracle:
    """The hash LM's answer is computed by a few lines of Python, so no request is ever repeated."""

    can_poison_execute = True

    def __init__(self, adapters: Sequence[str] = ()) -> None:
        """``adapters``: names that can be selected now, in the order of their numbers."""
        self._adapters = adapters

    def embedding(self, prompt: list[int]) -> npt.NDArray[np.float32] | None:
        hidden = hidden_of(state_of(prompt))
        return hidden / np.linalg.norm(hidden)

    def draw(self, rng: random.Random) -> tuple[dict[str, Any], list[int]]:
        prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(3, 200))]
        num_tokens = rng.randrange(5, 500)
        request: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens}
        if rng.random() < 0.5:
            request |= {"temperature": 0.8, "seed": rng.randrange(1 << 30)}
        names = ["", *self._adapters]  # as they are now: more may follow
        adapter = rng.randrange(len(names))
        request["lora"] = names[adapter]
        expected = expected_tokens(
            prompt, num_tokens, VOCAB_SIZE, temperature=request.get("temperature", 0.0), seed=request.get("seed", 0),
            adapter=adapter,
        )  # fmt: skip
        return request, expected


class RecordedOracle:
    """For a real model: answers of the same pipeline, recorded before the first fault."""

    can_poison_execute = False

    def __init__(self, client: Client, *, num_requests: int, seed: int) -> None:
        rng = random.Random(seed)
        self._requests = [self._make(rng, index) for index in range(num_requests)]
        answers = client.generate_all(self._requests)
        self._expected = [answer.token_ids for answer in answers]

    def _make(self, rng: random.Random, index: int) -> dict[str, Any]:
        words = " ".join(
            rng.choice(["def", "return", "list", "what", "is", "for", "in", "class", "len"]) for _ in range(12)
        )
        options = {"temperature": 0.7, "seed": index} if index % 2 else {"temperature": 0.0}
        return {"prompt": words, "max_tokens": rng.randrange(20, 300), "ignore_eos": True, **options}

    def embedding(self, prompt: list[int]) -> npt.NDArray[np.float32] | None:
        return None

    def draw(self, rng: random.Random) -> tuple[dict[str, Any], list[int]]:
        index = rng.randrange(len(self._requests))
        return self._requests[index], self._expected[index]


@dataclass
class Watch:
    """What clients received last, to measure how long they received nothing."""

    token_at: float = 0.0
    accept_at: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refusal_ms: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, detail: str = "") -> None:
        with self.lock:
            self.counts[name] += 1
            if detail and len(self.wrong) < 20:
                self.wrong.append(f"{name}: {detail}")


class Clients:
    """A number of concurrent streams over a few connections, until told to stop."""

    def __init__(self, run_dir: Path, oracle: Oracle, *, streams: int, seed: int, poison_share: float) -> None:
        self.watch = Watch()
        self.stopping = threading.Event()
        self._run_dir, self._oracle, self._poison_share = run_dir, oracle, poison_share
        self._clients = [Client(run_dir) for _ in range(4)]
        self._threads = [threading.Thread(target=self._live, args=[i, seed], daemon=True) for i in range(streams)]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> int:
        """The number of streams that did not end, or by an unexpected error."""
        self.stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for client in self._clients:
            client.close()
        return len(self._threads) - self.watch.counts["ended"]

    def _live(self, index: int, seed: int) -> None:
        rng = random.Random(f"{seed}/{index}")
        client = self._clients[index % len(self._clients)]
        while not self.stopping.is_set():
            share = rng.random()
            try:
                if share < self._poison_share:
                    self._poison(client, rng)
                elif share < 0.06:
                    self._send_invalid(client, rng)
                elif share < 0.10:
                    self._vanish(rng)
                elif share < 0.15:
                    self._embed(client, rng)
                elif share < 0.20:
                    self._hand_over(client, rng)
                else:
                    self._read(client, rng, abort=share < 0.28)
            except Overloaded:
                self.watch.count("overloaded")
                self.stopping.wait(0.1)
            except TriptychError as error:
                if error.param == "lora":  # the adapter was being unloaded
                    self.watch.count("too_late")
                    continue
                self.watch.count("lost", f"{type(error).__name__}: {error.message:.200}")
        self.watch.count("ended")

    def _read(self, client: Client, rng: random.Random, *, abort: bool) -> None:
        request, expected = self._oracle.draw(rng)
        began = time.monotonic()
        stream = client.submit(**request, lease_s=LEASE_S)
        try:
            got = self._follow(stream, abort_after=rng.randrange(1, 60) if abort else None)
            completion = stream.result(max(1.0, ANSWER_S - (time.monotonic() - began)))
        except Overloaded:
            raise
        except RequestError as error:
            if error.param == "lora":
                raise
            self.watch.count("innocent_failed", f"{error.code}: {error.message:.200}")
            return
        if completion.finish_reason == "abort" and not abort:
            self.watch.count("lost", "it was aborted without a request")
        elif completion.token_ids != expected[: len(completion.token_ids)] or got != completion.token_ids:
            self.watch.count("altered", f"{request} gave {completion.token_ids[:20]}...")
        elif completion.finish_reason != "abort" and len(completion.token_ids) != len(expected):
            self.watch.count("altered", f"{len(completion.token_ids)} tokens in place of {len(expected)}")
        else:
            self.watch.count("aborted" if completion.finish_reason == "abort" else "whole")
            self.watch.counts["tokens"] += len(got)

    def _follow(self, stream: Stream, *, abort_after: int | None) -> list[int]:
        stream.accepted(ANSWER_S)
        self.watch.accept_at = time.monotonic()
        got: list[int] = []
        for delta in stream:
            self.watch.token_at = time.monotonic()
            got += delta.token_ids
            if abort_after is not None and len(got) >= abort_after:
                stream.abort()
                abort_after = None
        return got

    def _hand_over(self, client: Client, rng: random.Random) -> None:
        """Another client goes on where the first one stopped reading."""
        request, expected = self._oracle.draw(rng)
        got: list[int] = []
        with Client(self._run_dir) as first:
            stream = first.submit(**request, lease_s=LEASE_S, keep=True)
            stream.accepted(ANSWER_S)
            text = ""
            for delta in islice(stream, rng.randrange(1, 20)):
                got, text = got + delta.token_ids, text + delta.text
            first.detach(stream.request_id, PipelineClosed("handed over"))
        try:
            rest = client.resume(stream.request_id, num_tokens=len(got), num_chars=len(text)).result(ANSWER_S)
        except RequestError as error:
            self.watch.count("innocent_failed", f"{error.code}: {error.message:.200}")
            return
        is_right = got + rest.token_ids == expected
        self.watch.count("handed_over" if is_right else "altered", "" if is_right else f"{request} in two parts")

    def _embed(self, client: Client, rng: random.Random) -> None:
        prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(3, 500))]
        try:
            found = client.embed(prompt, timeout=ANSWER_S, lease_s=LEASE_S).values
        except Overloaded:
            raise
        except RequestError as error:
            self.watch.count("innocent_failed", f"{error.code}: {error.message:.200}")
            return
        expected = self._oracle.embedding(prompt)
        is_right = expected is None or np.allclose(found, expected, atol=1e-6)
        self.watch.count("embedded" if is_right else "altered", "" if is_right else f"embedding of {prompt[:20]}...")

    def _vanish(self, rng: random.Random) -> None:
        request, _ = self._oracle.draw(rng)
        with Client(self._run_dir) as client:
            client.submit(**request, lease_s=VANISHED_LEASE_S).accepted(ANSWER_S)
        self.watch.count("vanished")

    def _send_invalid(self, client: Client, rng: random.Random) -> None:
        began = time.monotonic()
        try:
            client.submit([1, 2, 3], **rng.choice(INVALID)).result(ANSWER_S)
        except InvalidRequest:
            self.watch.count("refused")
            self.watch.refusal_ms.append((time.monotonic() - began) * 1e3)
        else:
            self.watch.count("lost", "a wrong request was not refused")

    def _poison(self, client: Client, rng: random.Random) -> None:
        if self._oracle.can_poison_execute and rng.random() < 0.8:
            kind = rng.choice(list(POISONS))
            stream, expected = client.submit([5, SPARE, kind], max_tokens=10, lease_s=LEASE_S), POISONS[kind]
        else:
            stream, expected = client.submit(f"<<abort>>{uuid.uuid4()}", max_tokens=5, lease_s=LEASE_S), Poisoned
        try:
            stream.result(ANSWER_S)
        except expected:
            self.watch.count("poison_named")
        except RequestError as error:
            self.watch.count("poison_unnamed", f"{error.code}: {error.message:.100}")
        else:
            self.watch.count("poison_unnamed", "it was answered")
