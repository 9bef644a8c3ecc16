"""``triptych generate``: sources of prompts, formats of answers, and the handling of bad prompts."""

from __future__ import annotations

import codecs
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Triptych
from tests.waiting import eventually
from triptych import Client, Driver
from triptych.launch.prompts import jobs_from_lines


@pytest.fixture
def generate(triptych: Triptych, run_dir: str) -> Triptych:
    """Run the verb on the shared pipeline."""
    return lambda *arguments, stdin=b"": triptych(
        "generate", "--connect", run_dir, "--max-tokens", "4", *arguments, stdin=stdin
    )


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompt_goes_through_the_chat_template_unless_raw(generate: Triptych, run_dir: str) -> None:
    with Client(run_dir) as client:
        expected = client.generate(messages=[{"role": "user", "content": "hello"}], max_tokens=4)
    assert generate("hello").out == generate("hello", "--chat").out == expected.text + "\n"
    assert generate("hello", "--raw").out != expected.text + "\n"


def test_answers_are_in_the_order_of_the_prompts(generate: Triptych) -> None:
    prompts = [f"prompt {index}" for index in range(20)]
    outcome = generate(*prompts, "--format", "jsonl")
    assert [(row["index"], row["prompt"]) for row in rows_of(outcome.out)] == list(enumerate(prompts))


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "marked"])
@pytest.mark.parametrize("source", ["file", "pipe", "dash"])
def test_lines_of_a_file_or_a_pipe_are_prompts(generate: Triptych, tmp_path: Path, source: str, mark: bytes) -> None:
    text = mark + b"one\n\n  \ntwo\r\nthree"
    (tmp_path / "prompts").write_bytes(text)
    arguments = {"file": ["--file", str(tmp_path / "prompts")], "pipe": [], "dash": ["-f", "-"]}[source]
    outcome = generate("--format", "jsonl", *arguments, stdin=text)
    assert [row["prompt"] for row in rows_of(outcome.out)] == ["one", "two", "three"]
    assert outcome.code == 0


def test_line_may_have_a_deadline(generate: Triptych) -> None:
    limits = {"priority": -1, "max_queue_ms": 60_000, "cache_salt": "tenant"}
    lines = [{"prompt": "a", "deadline_ms": ms, **limits} for ms in (60_000, 1e-3)]
    outcome = generate("--format", "jsonl", stdin="\n".join(map(json.dumps, lines)).encode())
    answered, late = rows_of(outcome.out)
    assert answered["finish_reason"] == "length"
    assert late["error"]["code"] == "deadline_exceeded"
    assert outcome.code == 1


def test_line_may_have_every_field_of_a_request(generate: Triptych) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "structured": {"choice": ["yes", "no"]}, "max_tokens": 9},
        {"prompt": "b", "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": "c", "tools": []},
        {"prompt": "d" * 100, "max_prompt_tokens": 10, "truncation": "left", "return_prompt": True},
    ]
    held, equipped, wrong, cut = rows_of(
        generate("--format", "jsonl", stdin="\n".join(map(json.dumps, lines)).encode()).out
    )
    assert held["text"] in ("yes", "no")
    assert equipped["finish_reason"] == "length"
    assert wrong["error"]["param"] == "tools"
    assert cut["usage"]["prompt_tokens"] == 10


def test_line_may_be_an_object_with_its_own_parameters(generate: Triptych) -> None:
    lines = [
        {"prompt": "a", "max_tokens": 2},
        {"prompt_token_ids": [5, 6, 7], "logprobs": 0},
        {"messages": [{"role": "user", "content": "b"}], "logit_bias": {"7": 1.5}, "request_id": "mine"},
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode() + b"\n{plain text} in braces"
    rows = rows_of(generate("--format", "jsonl", stdin=stdin).out)
    assert [len(row["token_ids"]) for row in rows] == [2, 4, 4, 4]
    assert len(rows[1]["logprobs"]) == 4
    assert rows[2]["request_id"] == "mine"
    assert rows[3]["prompt"] == "{plain text} in braces"


def test_row_has_what_was_asked_about_the_prompt(generate: Triptych) -> None:
    lines = [
        {"prompt": "abc", "return_prompt": True},
        {"prompt_token_ids": [5, 6, 7], "max_prompt_tokens": 2, "truncation": "left"},
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    text, ids = rows_of(generate("--prompt-logprobs", "1", "--format", "jsonl", stdin=stdin).out)
    first, *others = text["prompt_logprobs"]
    assert first is None
    assert len(text["prompt_token_ids"]) == 1 + len(others) == text["usage"]["prompt_tokens"]
    assert all(token["rank"] >= 1 and len(token["alternatives"]) == 1 for token in others)
    assert ids["prompt_token_ids"] == [5, 6, 7]  # as in the line, which --resume compares
    assert len(ids["prompt_logprobs"]) == 2


def test_every_choice_of_an_answer_has_a_row(generate: Triptych) -> None:
    request = {"prompt": "a", "n": 2, "best_of": 3, "temperature": 1.0, "seed": 3}
    stdin = "\n".join(map(json.dumps, [request, {"prompt": "b"}])).encode()
    rows = rows_of(generate("--format", "jsonl", stdin=stdin).out)
    assert [(row["index"], row.get("choice")) for row in rows] == [(0, 0), (0, 1), (1, None)]
    assert rows[0]["score"] > rows[1]["score"]
    assert rows[0]["request_id"] == rows[1]["request_id"]
    texts = generate("a", "--raw", "--n", "3", "--temperature", "1", "--seed", "3").out
    shown = generate("a", "--raw", "--n", "3", "--temperature", "1", "--seed", "3", "--stream").out
    assert texts == shown
    assert len(set(texts.rstrip("\n").split("\n"))) >= 3


def test_row_contains_everything_known_about_an_answer(generate: Triptych) -> None:
    [row] = rows_of(generate("hello", "--format", "jsonl").out)
    assert set(row) == {"index", "request_id", "prompt", "text", "token_ids", "finish_reason", "usage", "ledger"}
    assert row["usage"]["completion_tokens"] == 4
    assert sum(row["ledger"]["stages_ms"].values()) == pytest.approx(row["ledger"]["wall_ms"])


@pytest.mark.parametrize(
    ("line", "param"),
    [
        (b'{"prompt": "x", "temperature": -1}', "temperature"),
        (b'{"prompt": "x", "colour": "red"}', "colour"),
        (b'{"prompt": "x", "keep": true}', "keep"),
        (b'{"prompt": "x", "self": 1}', "self"),
        (b'{"max_tokens": 3}', "prompt"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"messages": "hello"}', "messages"),
        (b'{"prompt": "x", "request_id": ["a"]}', "request_id"),
        (b'{"prompt": "cut', None),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b"\xff\xfe", "prompt"),
    ],
    ids=["limit", "unknown", "argument", "self", "empty", "type", "messages", "name", "syntax", "surrogate", "utf-8"],
)
def test_bad_prompt_gives_an_error_row_and_does_not_stop_others(
    generate: Triptych, line: bytes, param: str | None
) -> None:
    outcome = generate("--format", "jsonl", stdin=b"good\n" + line + b"\ngood")
    first, bad, last = rows_of(outcome.out)
    assert outcome.code == 1
    assert first["text"] == last["text"]
    assert (bad["index"], bad["error"]["code"], bad["error"]["param"]) == (1, "invalid_request", param)
    assert "2 of 3 prompts answered, 1 failed" in outcome.err


@pytest.mark.parametrize("rest", [b'"prompt": 5', b'"messages": "a"', b'"keep": true', b'"prompt": "\\ud800"'])
def test_refused_line_keeps_its_id(rest: bytes) -> None:
    [job] = jobs_from_lines([b'{"id": "mine", ' + rest + b"}"])
    assert (job.error is not None, job.id) == (True, "mine")


def test_null_in_a_line_is_a_field_that_is_not_given() -> None:
    """Tables written by pandas have every column in every line."""
    line = b'{"id": null, "prompt": "a", "messages": null, "temperature": null, "max_tokens": null}'
    [job] = jobs_from_lines([line])
    assert (job.error, job.id, job.request) == (None, None, {"prompt": "a", "max_tokens": None})


@pytest.mark.parametrize("line", [b'{"id": true, "prompt": 5}', b'{"id": "\\ud800", "prompt": 5}', b'{"id": "cut'])
def test_refused_line_without_a_usable_id_has_none(line: bytes) -> None:
    [job] = jobs_from_lines([line])
    assert (job.error is not None, job.id) == (True, None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt" 5}', "line 2: not JSON: Expecting ':' delimiter at character 10"),
        (b"\xff\xfea", "line 2: not UTF-8: byte 0xff after 0 others"),
    ],
    ids=["JSON", "UTF-8"],
)
def test_refused_line_is_named_as_in_the_file(line: bytes, words: str) -> None:
    [_, job] = jobs_from_lines([b"hello\n", line + b"\n"])
    assert job.error is not None
    assert job.error.message == words


def test_failed_prompt_leaves_its_line_of_text_empty(generate: Triptych) -> None:
    good = generate("good").out
    outcome = generate(stdin=b'good\n{"prompt": "x", "top_p": 7}\ngood')
    assert outcome.out == f"{good}\n{good}"
    assert "prompt 1: top_p is 7" in outcome.err


@pytest.mark.parametrize(("name", "is_jsonl"), [("a.jsonl", True), ("a.txt", False), ("a", False)])
def test_output_suffix_determines_the_format(generate: Triptych, tmp_path: Path, name: str, is_jsonl: bool) -> None:
    assert generate("hello", "--output", tmp_path / name) == (0, "", "")
    assert (tmp_path / name).read_text().startswith('{"index": 0') == is_jsonl


@pytest.mark.parametrize("output", ["/dev/full", "{tmp}", "{tmp}/no/such/folder/out.txt"])
def test_unwritable_output_is_named(generate: Triptych, tmp_path: Path, output: str) -> None:
    output = output.format(tmp=tmp_path)
    outcome = generate("hello", "--output", output)
    assert outcome.code == 1
    assert outcome.err.startswith(f"error: cannot write {output}: ")
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "/no/such/file"], "cannot read /no/such/file: No such file"),
        (["--file", "/dev/null"], "nothing to answer"),
        (["a", "--file", "/dev/null"], "not both"),
        (["a", "b", "--stream"], "only one prompt can be streamed"),
        (["a", "--temperature", "-1"], "temperature is -1.0, the limits are 0.0 and 100.0"),
        (["a", "--max-tokens", "-1"], "max_tokens is -1, the limits are 0 and"),
        (["a", "--logit-bias", "x"], "logit_bias is 'x', the form is TOKEN_ID=BIAS"),
        (["a", "--logit-bias", "1_0=5"], "logit_bias is '1_0=5', the form is TOKEN_ID=BIAS"),
        (["a", "--logprobs", "1"], "logprobs is 1, but a text has none: they need --format jsonl"),
        (["a", "--page-size", "4"], "--page-size: the pipeline at "),
        (["a", "--log-level", "loud"], "log_level is 'loud', known are: debug"),
    ],
    ids=lambda value: value[-2][2:] if isinstance(value, list) else "",
)
def test_impossible_options_are_refused_with_the_reason(generate: Triptych, arguments: list[str], words: str) -> None:
    outcome = generate(*arguments)
    assert outcome.code == 2
    assert words in outcome.err


def test_prompts_are_not_overwritten_by_their_answers(generate: Triptych, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("hello\n")
    (tmp_path / "link").symlink_to("a.jsonl")
    outcome = generate("--file", tmp_path / "link", "--output", tmp_path / "a.jsonl")
    assert outcome.code == 2
    assert "a.jsonl, which is the file with the requests" in outcome.err
    assert (tmp_path / "a.jsonl").read_text() == "hello\n"


def test_single_answer_can_be_streamed_into_a_pipe(generate: Triptych) -> None:
    assert generate("hello", "--stream") == generate("hello", "--no-stream")


def test_more_prompts_than_the_queue_holds_are_all_answered(triptych: Triptych) -> None:
    stdin = b"\n".join(b"prompt %d" % index for index in range(12))
    own = ["--model", "hash-lm", "--max-queue", "1", "--max-num-seqs", "2", "--hash-step-ms", "2"]
    outcome = triptych("generate", *own, "--max-tokens", "8", "--format", "jsonl", stdin=stdin)
    assert outcome.code == 0
    assert [len(row["token_ids"]) for row in rows_of(outcome.out)] == [8] * 12


def test_connecting_to_no_pipeline_is_an_error(triptych: Triptych, tmp_path: Path) -> None:
    outcome = triptych("generate", "hello", "--connect", tmp_path)
    assert outcome.code == 2
    assert f"no pipeline runs in {tmp_path}" in outcome.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"caf\xe9", "line 1: not UTF-8: byte 0xe9 after 3 others"),
        (b'{"prompt": "\\ud800"}', "line 1: not UTF-8: a lone surrogate"),
        ("hello".encode("utf-16"), "the prompts are UTF-16, not UTF-8; iconv"),
    ],
    ids=["latin-1", "surrogate", "utf-16"],
)
def test_invalid_utf8_is_reported_with_its_byte(generate: Triptych, line: bytes, words: str) -> None:
    outcome = generate(stdin=line)
    assert words in outcome.err
    assert outcome.code in (1, 2)


def test_pipeline_without_a_driver_is_reported_at_once(triptych: Triptych, run_dir: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    shutil.copy(Path(run_dir, "config.json"), tmp_path)
    (tmp_path / "lock").touch(0o600)
    code, _, errors = triptych("generate", "hello", "--connect", tmp_path)
    assert code == 2
    assert f"its driver is gone; triptych serve --run-dir {tmp_path} continues it" in errors


@pytest.mark.parametrize("flags", [["--stream"], ["--format", "jsonl"]], ids=["streamed", "batch"])
def test_requests_are_aborted_when_answers_cannot_be_written(triptych: Triptych, flags: list[str]) -> None:
    """Otherwise a service would continue unread answers until their leases end."""
    quick = [] if flags == ["--stream"] else [{"prompt": "x", "max_tokens": 9}]
    slow = {"prompt": "x", "max_tokens": 4000, "request_id": "slow"}
    stdin = b"\n".join(json.dumps(line).encode() for line in [*quick, slow])
    with Driver("hash-lm", hash_step_ms=10.0) as driver, Client(driver.run_dir) as client:
        outcome = triptych("generate", "--connect", driver.run_dir, "--output", "/dev/full", *flags, stdin=stdin)
        assert (outcome.code, outcome.err) == (1, "error: cannot write /dev/full: No space left on device\n")
        # Its end may have been acknowledged and forgotten already, but it is still in the list of ended requests.
        eventually(lambda: ("slow", "abort") in [(line.request_id, line.state) for line in client.requests().ended])
