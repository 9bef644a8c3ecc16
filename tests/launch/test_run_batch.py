"""``triptych run-batch``: a file of OpenAI's Batch API, answered like HTTP requests, and resumable after a failure."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Outcome, Triptych
from tests.launch.test_processes import process
from tests.pipeline.checks import expected
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway import api_routes
from triptych.launch.run_batch.in_process import post
from triptych.launch.run_batch.lines import Line

PROMPT = [5, 6, 7]
PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    if url == "/v1/completions":
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def text_of(*requests: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in requests)


def rows_in(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len({row["custom_id"] for row in rows}) == len(rows)
    assert {frozenset(row) for row in rows} <= {frozenset({"id", "custom_id", "response", "error"})}
    return {row["custom_id"]: row["response"] for row in rows}


@pytest.fixture(name="run_batch")
def fixture_run_batch(triptych: Triptych, run_dir: str, tmp_path: Path) -> Callable[..., Outcome]:
    """Run the verb on the shared pipeline, from in.jsonl to out.jsonl."""

    def call(text: str | bytes, *arguments: str) -> Outcome:
        (tmp_path / "in.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
        files = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
        return triptych("run-batch", "--connect", run_dir, *files, *arguments)

    return call


def test_every_request_is_answered_in_the_format_of_its_route(
    run_batch: Callable[..., Outcome], tmp_path: Path
) -> None:
    question = [{"role": "user", "content": "hello"}]
    requests = [
        request("completion"),
        request("chat", "/v1/chat/completions", messages=question, max_tokens=4),
        request("message", "/v1/messages", model="hash-lm", messages=question, max_tokens=4),
        request("response", "/v1/responses", input="hello", max_output_tokens=16),
        request("embeddings", "/v1/embeddings", input=["hello", "you"]),
    ]
    outcome = run_batch("\ufeff" + text_of(*requests) + "\n")
    assert (outcome.code, outcome.out) == (0, "")
    assert "5 of 5 requests answered, 0 failed · 36 tokens in " in outcome.err  # 28 of answers, 8 of texts
    rows = rows_in(tmp_path / "out.jsonl")
    assert rows["completion"]["body"]["choices"][0]["token_ids"] == expected(PROMPT, 4)
    objects = {name: row["body"].get("object", row["body"].get("type")) for name, row in rows.items()}
    assert objects == {
        "completion": "text_completion", "chat": "chat.completion", "message": "message", "response": "response",
        "embeddings": "list",
    }  # fmt: skip
    assert all(row["status_code"] == 200 and row["request_id"] for row in rows.values())


def test_example_of_the_page_is_answered(run_batch: Callable[..., Outcome], tmp_path: Path) -> None:
    [example] = re.findall(r"```json\n(.*?)```", PAGE.partition("vllm run-batch")[2], re.DOTALL)
    outcome = run_batch(example, "--served-model-name", "gpt-5")
    assert outcome.code == 0, outcome.err
    assert rows_in(tmp_path / "out.jsonl")["1"]["body"]["model"] == "gpt-5"


def test_failed_request_does_not_stop_others(run_batch: Callable[..., Outcome], tmp_path: Path) -> None:
    bad: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 9e9},
        "stream": {"stream": True},
        "model": {"model": "gpt-4"},
    }
    requests = [request(name, **body) for name, body in bad.items()]
    outcome = run_batch(text_of(request("first"), *requests, request("last")))
    assert outcome.code == 1
    assert "2 of 5 requests answered, 3 failed" in outcome.err
    rows = rows_in(tmp_path / "out.jsonl")
    assert rows["first"]["body"]["choices"] == rows["last"]["body"]["choices"]
    found = {name: (rows[name]["status_code"], rows[name]["body"]["error"]["param"]) for name in bad}
    assert found == {"temperature": (400, "temperature"), "stream": (400, "stream"), "model": (404, "model")}


def test_body_that_cannot_be_encoded_again_is_refused_and_ends_no_batch() -> None:
    """Such a line can be read if the stack was less full then."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    nowhere: Any = None
    reply = asyncio.run(post(nowhere, Line("a", "/v1/messages", {"tools": deep})))
    assert (reply.status, reply.body["type"]) == (400, "error")
    assert "nested too deep" in reply.body["error"]["message"]


def test_model_may_have_the_name_used_by_the_requests(run_batch: Callable[..., Outcome], tmp_path: Path) -> None:
    names = ("--served-model-name", "gpt-4", "--served-model-name", "gpt-5")
    assert run_batch(text_of(request("a", model="gpt-4"), request("b", model="gpt-5")), *names).code == 0
    found = {name: row["body"]["model"] for name, row in rows_in(tmp_path / "out.jsonl").items()}
    assert found == {"a": "gpt-4", "b": "gpt-5"}  # written in the order in which they were answered


def test_internal_error_is_reported_and_does_not_stop_others(
    run_batch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api_routes, "create_response", fail)
    outcome = run_batch(text_of(request("bad", "/v1/responses", input="x"), request("good")))
    rows = rows_in(tmp_path / "out.jsonl")
    assert (rows["bad"]["status_code"], rows["bad"]["body"]["error"]["code"]) == (500, "internal_error")
    assert rows["good"]["status_code"] == 200
    assert "request 'bad' failed" in outcome.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"custom_id": "cut', "line 2: not JSON: Unterminated string starting at character 14"),
        (b"{", "line 2: not JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"\xff\xfe", "line 2: not UTF-8: byte 0xff after 0 others"),
        (b"[1]", "line 2: a request is an object, got [1]"),
        (b'{"custom_id": "x", "url": "/v1/completions"}', "line 2: body, method is required"),
        (json.dumps({**request("x"), "id": 1}).encode(), "line 2: unknown field 'id'"),
        (json.dumps(request("")).encode(), "line 2: custom_id must be a non-empty string, got ''"),
        (json.dumps({**request("x"), "custom_id": 5}).encode(), "line 2: custom_id must be a non-empty string, got 5"),
        (json.dumps({**request("x"), "method": "GET"}).encode(), "line 2: method is 'GET', must be 'POST'"),
        (json.dumps(request("x", "/v1/load_lora_adapter")).encode(), "url is '/v1/load_lora_adapter', known are: /v1/"),
        (json.dumps({**request("x"), "body": "hi"}).encode(), "line 2: body must be an object, got 'hi'"),
        (json.dumps(request("first")).encode(), "line 2: custom_id 'first' is already used by another line"),
        (b'{"custom_id": "\xe9"}', "line 2: not UTF-8: byte 0xe9"),
    ],
    ids=[
        "cut",
        "brace",
        "marked",
        "list",
        "missing",
        "unknown",
        "empty",
        "number",
        "get",
        "url",
        "body",
        "twice",
        "latin-1",
    ],
)
def test_malformed_batch_file_is_refused_before_any_request_runs(
    run_batch: Callable[..., Outcome], tmp_path: Path, line: bytes, words: str
) -> None:
    (tmp_path / "out.jsonl").write_text("what was there\n")
    outcome = run_batch(text_of(request("first")).encode() + line + b"\n")
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert (tmp_path / "out.jsonl").read_text() == "what was there\n"


@pytest.mark.parametrize(("text", "words"), [(b"\n \n", "nothing to answer"), ("a".encode("utf-16"), "UTF-16, not")])
def test_file_without_requests_is_refused(run_batch: Callable[..., Outcome], text: bytes, words: str) -> None:
    outcome = run_batch(text)
    assert outcome.code == 2
    assert words in outcome.err


def test_batch_is_resumed(run_batch: Callable[..., Outcome], tmp_path: Path) -> None:
    requests = [request(f"{number}", prompt=[number], max_tokens=3) for number in range(1, 6)]
    output = tmp_path / "out.jsonl"
    assert run_batch(text_of(*requests[:2], {**requests[2], "body": {"prompt": "x", "top_p": 7}})).code == 1
    first = output.read_text().splitlines(keepends=True)
    kept = {line for line in first if '"status_code": 200' in line}
    assert len(kept) == 2
    output.write_text("".join(first) + first[0].replace('"1"', '"4"').replace('"2"', '"4"')[:-9])  # as after a kill
    outcome = run_batch(text_of(*requests), "--resume")
    assert outcome.code == 0
    assert "2 of 5 requests are already answered" in outcome.err
    assert "3 of 3 requests answered" in outcome.err
    assert kept < set(output.read_text().splitlines(keepends=True))
    outputs = {name: row["body"]["choices"][0]["token_ids"] for name, row in rows_in(output).items()}
    assert outputs == {f"{number}": expected([number], 3) for number in range(1, 6)}
    before = output.read_bytes()
    assert run_batch(text_of(*requests), "--resume").code == 0
    assert output.read_bytes() == before


def test_request_refused_by_a_full_queue_is_retried(triptych: Triptych, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(text_of(*(request(str(number)) for number in range(12))))
    own = ("hash-lm", "--max-queue", "1", "--max-num-seqs", "2", "--hash-step-ms", "2")
    outcome = triptych("run-batch", *own, "-i", tmp_path / "in", "-o", tmp_path / "out")
    assert outcome.code == 0
    assert len(rows_in(tmp_path / "out")) == 12


def test_unwritable_output_ends_the_run(triptych: Triptych, run_dir: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(text_of(request("a")))
    outcome = triptych("run-batch", "--connect", run_dir, "-i", tmp_path / "in", "-o", "/dev/full")
    assert (outcome.code, outcome.err) == (1, "error: cannot write /dev/full: No space left on device\n")


def test_requests_are_not_overwritten_by_their_answers(run_batch: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to("in.jsonl")
    outcome = run_batch(text_of(request("a")))
    assert outcome.code == 2
    assert "which is the file with the requests" in outcome.err
    assert (tmp_path / "in.jsonl").read_text() == text_of(request("a"))


def test_signal_aborts_requests_in_progress_and_keeps_answers(tmp_path: Path) -> None:
    requests = [request("quick"), *(request(f"slow {index}", max_tokens=4000) for index in range(3))]
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(text_of(*requests))
    with Driver("hash-lm", hash_step_ms=10.0) as driver:
        arguments = ("run-batch", "--connect", str(driver.run_dir), "-i", str(source), "-o", str(output))
        with process(*arguments) as running:
            eventually(lambda: output.exists() and output.read_text().endswith("\n"))
            running.send_signal(signal.SIGTERM)
            _, errors = running.communicate(timeout=20)
        assert running.returncode == 143
        assert "Traceback" not in errors
        assert list(rows_in(output)) == ["quick"]
        eventually(lambda: driver.stats()["summarize"]["finished"]["abort"] == 3, timeout=5)
