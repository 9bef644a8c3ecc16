"""A client written only from docs/protocol.md: pyzmq and msgpack, and nothing of this package.

The page says what to send and what is returned; these tests do that with a running pipeline. ``Driver`` starts it and
kills its workers, and is not used otherwise.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.waiting import eventually
from triptych import Driver

SUBMIT, GET_INFO, ACCEPTED, REJECTED, INFO = 1, 2, 3, 4, 5
FOLLOW, ABORT, ACKNOWLEDGE, GET_STATUS, GET_STATS = 10, 11, 12, 13, 14
TEXT, FINISHED, FAILED, STATUS, STATS = 20, 21, 22, 23, 24

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
REPEAT_S, PATIENCE_S = 0.25, 30.0
NUM_TOKENS = 700  # more than two windows
REQUEST: dict[str, Any] = {
    "prompt": "What does a raw client need?",
    "max_tokens": NUM_TOKENS,
    "temperature": 1.0,
    "seed": 7,
}


class Dealer:
    """A DEALER socket connected to one of the two endpoints."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{run_dir}/{name}")

    def send(self, tag: int, *fields: Any) -> None:
        self.socket.send(msgpack.packb([tag, 1, 0, 0, *fields]))

    def recv(self, timeout_s: float = REPEAT_S) -> list[Any] | None:
        """``[tag, ...fields]`` of the next frame, or None."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        tag, _version, _epoch, _seq, *fields = msgpack.unpackb(self.socket.recv())
        return [tag, *fields]

    def ask(self, tag: int, *fields: Any) -> list[Any]:
        """The first answer; the question is repeated until there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.send(tag, *fields)
            if (answer := self.recv()) is not None:
                return answer
        raise TimeoutError(f"no answer to a message of tag {tag}")


class RawClient:
    """One request and the part of its answer received so far: the page's sections "Submit" and "Follow"."""

    def __init__(self, run_dir: Path, request_id: str = "", *, num_tokens: int = 0, num_chars: int = 0) -> None:
        self.submit_dealer, self.follow_dealer = Dealer(run_dir, "submit"), Dealer(run_dir, "follow")
        self.request_id = request_id or uuid.uuid4().hex
        self.num_tokens, self.num_chars = num_tokens, num_chars  # from the beginning of the answer
        self.token_ids: list[int] = []
        self.text = ""
        self.num_rows = 0
        self.again = True
        self.end: list[Any] | None = None

    def submit(self, **request: Any) -> list[Any]:
        return self.submit_dealer.ask(SUBMIT, self.request_id, request)

    def follow(self, until_tokens: float = float("inf")) -> None:
        """Receive until the terminal message, or until there are that many tokens."""
        followed, repeat_at, deadline = self.num_tokens, 0.0, time.monotonic() + PATIENCE_S
        while self.end is None and self.num_tokens < until_tokens:
            now = time.monotonic()
            assert now < deadline, f"{self.num_tokens} tokens after {PATIENCE_S} s"
            if self.again or now >= repeat_at or self.num_tokens - followed >= 64:
                self.follow_dealer.send(FOLLOW, [[self.request_id, self.num_tokens, self.again]])
                self.again, followed, repeat_at = False, self.num_tokens, now + REPEAT_S
            if (frame := self.follow_dealer.recv(max(0.0, repeat_at - now))) is not None:
                self._take(*frame)

    def _take(self, tag: int, *fields: Any) -> None:
        if tag == TEXT:
            for request_id, *row in fields[0]:
                if request_id == self.request_id:
                    self._add(*row[:4])
        elif tag in (FINISHED, FAILED) and fields[0] == self.request_id and self._add(*fields[1:5]):
            self.end = [tag, *fields]
            self.follow_dealer.send(ACKNOWLEDGE, [self.request_id])

    def _add(self, offset: int, text_offset: int, packed: bytes, text: str) -> bool:
        """False if there is a gap before the row: then everything from the gap on is requested again."""
        if offset > self.num_tokens or text_offset > self.num_chars:
            self.again = True
            return False
        token_ids = struct.unpack(f"<{len(packed) // 4}i", packed)[self.num_tokens - offset :]
        text = text[self.num_chars - text_offset :]
        self.token_ids += token_ids
        self.text += text
        self.num_tokens += len(token_ids)
        self.num_chars += len(text)
        self.num_rows += 1
        return True

    @property
    def finish_reason(self) -> str:
        assert self.end is not None
        assert self.end[0] == FINISHED, self.end
        return str(self.end[7])


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Driver]:
    with Driver("hash-lm", hash_step_ms=0.5, max_restarts=1000) as driver:
        yield driver


@pytest.fixture
def client(pipeline: Driver) -> RawClient:
    return RawClient(pipeline.run_dir)


@pytest.fixture(scope="module")
def whole(pipeline: Driver) -> RawClient:
    """An undisturbed answer, to compare the others with."""
    client = RawClient(pipeline.run_dir)
    assert client.submit(**REQUEST)[0] == ACCEPTED
    client.follow()
    return client


def test_answer_streams_in_rows_and_has_one_end(pipeline: Driver, whole: RawClient) -> None:
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == whole.num_tokens == NUM_TOKENS
    assert whole.num_rows > 3
    assert whole.follow_dealer.recv() is None
    assert pipeline.generate(**REQUEST).text == whole.text


def test_terminal_message_has_usage_and_ledger(whole: RawClient) -> None:
    assert whole.end is not None
    summary = whole.end[8]
    assert summary["usage"]["completion_tokens"] == NUM_TOKENS
    assert sum(summary["ledger"]["stages_ms"].values()) == pytest.approx(summary["ledger"]["wall_ms"])


def test_program_of_the_page_runs(pipeline: Driver, tmp_path: Path) -> None:
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    program = tmp_path / "client.py"
    program.write_text(source, encoding="utf-8")
    command = [sys.executable, "-X", "utf8", str(program), str(pipeline.run_dir), "Hello"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    answer = pipeline.generate(messages=[{"role": "user", "content": "Hello"}], max_tokens=50)
    assert done.stdout.decode() == f"{answer.text} length\n"


def test_repeated_submit_is_accepted_again_and_runs_once(client: RawClient, whole: RawClient) -> None:
    first = client.submit(**REQUEST)
    assert client.submit(**REQUEST) == first == [ACCEPTED, client.request_id, len(REQUEST["prompt"]), 0, NUM_TOKENS]
    client.follow()
    assert client.text == whole.text


def test_second_socket_resumes_at_an_offset(pipeline: Driver, client: RawClient, whole: RawClient) -> None:
    client.submit(**REQUEST)
    client.follow(until_tokens=300)
    second = RawClient(
        pipeline.run_dir, client.request_id, num_tokens=client.num_tokens, num_chars=client.num_chars
    )  # fmt: skip
    second.follow()
    assert client.token_ids + second.token_ids == whole.token_ids
    assert client.text + second.text == whole.text


def test_at_most_a_window_is_sent_past_the_last_follow(client: RawClient) -> None:
    window = client.submit_dealer.ask(GET_INFO)[1]["limits"]["window_tokens"]
    client.submit(**REQUEST)
    client.follow(until_tokens=1)
    acknowledged = 0
    while (frame := client.follow_dealer.recv(0.5)) is not None:
        client._take(*frame)
    assert client.num_tokens == acknowledged + window
    client.follow()
    assert client.num_tokens == NUM_TOKENS


def test_abort_keeps_the_text_so_far(client: RawClient, whole: RawClient) -> None:
    client.submit(**REQUEST)
    client.follow(until_tokens=5)
    client.follow_dealer.send(ABORT, client.request_id)
    client.follow()
    assert client.finish_reason == "abort"
    assert client.token_ids == whole.token_ids[: client.num_tokens]
    assert whole.text.startswith(client.text.rstrip("\ufffd"))


@pytest.mark.parametrize("role", ["prepare", "execute", "summarize"])
def test_dead_worker_costs_only_a_pause(pipeline: Driver, client: RawClient, whole: RawClient, role: str) -> None:
    restarts = pipeline.stats()["restarts"][role]
    client.submit(**REQUEST)
    client.follow(until_tokens=50)
    pipeline.restart(role)  # SIGKILL
    client.follow()
    assert (client.text, client.token_ids) == (whole.text, whole.token_ids)
    eventually(lambda: pipeline.stats()["restarts"][role] == restarts + 1)


def test_rejection_has_code_and_field(client: RawClient) -> None:
    tag, request_id, code, message, param = client.submit(prompt="Hello", temperature=-1.0)
    assert (tag, request_id, code, param) == (REJECTED, client.request_id, "invalid_request", "temperature")
    assert message == "temperature is -1.0, the limits are 0.0 and 100.0"
    assert client.submit(prompt="Hello", max_tokens=3)[0] == ACCEPTED, "a refused id can be reused"


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"garbage", msgpack.packb([1, 99, 0, 0]), b"\x91" * 2000])
@pytest.mark.parametrize("dealer", ["submit_dealer", "follow_dealer"])
def test_garbage_is_answered_and_the_next_request_served(client: RawClient, dealer: str, frame: bytes) -> None:
    getattr(client, dealer).socket.send(frame)
    answer = getattr(client, dealer).recv(PATIENCE_S)
    assert answer is not None
    assert answer[:3] == [REJECTED, "", "bad_frame"]
    assert client.submit(prompt="Hello", max_tokens=3)[0] == ACCEPTED
    client.follow()
    assert client.finish_reason == "length"


def test_acknowledged_request_is_forgotten_and_not_run_again(client: RawClient) -> None:
    client.submit(prompt="Hello", max_tokens=3)
    assert client.follow_dealer.ask(GET_STATUS, client.request_id)[2] in ("queued", "running", "finished")
    client.follow()
    eventually(lambda: client.submit(prompt="Hello", max_tokens=3)[2] == "duplicate_id")
    assert client.follow_dealer.ask(GET_STATUS, client.request_id)[1:3] == [client.request_id, "unknown"]
    answer = client.follow_dealer.ask(FOLLOW, [[client.request_id, 0, True]])
    assert answer[:8] == [FAILED, client.request_id, 0, 0, b"", "", None, "unknown_id"]


def test_submit_that_overtakes_the_acknowledgement_is_refused_on_its_repetition(client: RawClient) -> None:
    request = {"prompt": "Hello", "max_tokens": 3}
    client.submit(**request)
    eventually(lambda: client.follow_dealer.ask(GET_STATUS, client.request_id)[2] == "finished")
    assert client.submit(**request)[0] == ACCEPTED
    client.follow_dealer.send(ACKNOWLEDGE, [client.request_id])
    assert client.follow_dealer.ask(FOLLOW, [[client.request_id, 0, True]])[7] == "unknown_id"
    assert client.submit(**request)[2] == "duplicate_id"


@pytest.mark.parametrize(
    ("again", "answer"),
    [({"seed": 1, "top_p": 0.5}, ACCEPTED), ({"seed": 1, "top_p": 0.5, "n": 1}, REJECTED), ({"top_p": 0.5}, REJECTED)],
    ids=["another order", "an explicit default", "a field less"],
)
def test_identity_of_a_request_depends_on_fields_and_values(
    client: RawClient, again: dict[str, Any], answer: int
) -> None:
    assert client.submit(top_p=0.5, seed=1, prompt="Hello", max_tokens=3)[0] == ACCEPTED
    assert client.submit(prompt="Hello", max_tokens=3, **again)[0] == answer


def test_request_without_followers_ends_with_its_lease(client: RawClient) -> None:
    client.submit(**{**REQUEST, "max_tokens": 4000, "lease_s": 0.2})
    eventually(lambda: client.follow_dealer.ask(GET_STATUS, client.request_id)[2] in ("aborted", "unknown"))


def test_three_choices_are_followed_one_by_one(pipeline: Driver, client: RawClient) -> None:
    """The page's section "Several choices": one SUBMIT, then an id for each choice."""
    request = {**REQUEST, "n": 3}
    assert client.submit(**request)[:2] == [ACCEPTED, client.request_id]
    choices = [RawClient(pipeline.run_dir, f"{client.request_id} {index}") for index in range(3)]
    for index, choice in enumerate(choices):
        choice.follow()
        alone = RawClient(pipeline.run_dir)
        alone.submit(**{**REQUEST, "seed": REQUEST["seed"] + index})
        alone.follow()
        assert (choice.token_ids, choice.text) == (alone.token_ids, alone.text)
        assert choice.end is not None
        assert choice.end[8]["index"] == index
    eventually(lambda: client.follow_dealer.ask(GET_STATUS, client.request_id)[2] == "unknown")
    assert client.submit(**request)[2] == "duplicate_id"


def test_request_id_stands_for_all_its_choices(pipeline: Driver, client: RawClient) -> None:
    client.submit(**{**REQUEST, "max_tokens": 4000, "n": 2})
    answer = client.follow_dealer.ask(FOLLOW, [[client.request_id, 0, True]])
    assert answer[:8] == [FAILED, client.request_id, 0, 0, b"", "", None, "unknown_id"]
    state = client.follow_dealer.ask(GET_STATUS, client.request_id)
    assert state[2] in ("queued", "running")
    client.follow_dealer.send(ABORT, client.request_id)
    choices = [RawClient(pipeline.run_dir, f"{client.request_id} {index}") for index in range(2)]
    for choice in choices:
        choice.follow()
        assert choice.finish_reason == "abort"
    client.follow_dealer.send(ACKNOWLEDGE, [client.request_id])
    eventually(lambda: client.follow_dealer.ask(GET_STATUS, client.request_id)[2] == "unknown")


def test_single_best_choice_has_the_request_id(client: RawClient) -> None:
    client.submit(**{**REQUEST, "max_tokens": 20, "best_of": 4})
    client.follow()
    assert len(client.token_ids) == 20
    assert client.end is not None
    assert client.end[8]["score"] < 0


def test_info_and_stats_match_the_page(client: RawClient) -> None:
    [info] = client.submit_dealer.ask(GET_INFO)[1:]
    assert set(info) == {"model", "limits"}
    [stats] = client.follow_dealer.ask(GET_STATS)[1:]
    assert set(stats) == {"prepare", "execute", "summarize"}
