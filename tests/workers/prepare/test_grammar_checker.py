"""Clients' grammars compile, or are refused within the limits, and the next one is served."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.workers import tokenizer_zoo
from tests.workers.grammars import model_dir
from triptych.protocol import starvation
from triptych.protocol.errors import InvalidRequest
from triptych.workers.prepare import grammar_checker
from triptych.workers.prepare.grammar_checker import GrammarChecker
from triptych.workers.prepare.structured import checked_structured

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    folder = model_dir(tmp_path_factory.mktemp("model"), tokenizer_zoo.byte_level())
    checker = GrammarChecker(folder, timeout_s=TIMEOUT_S, memory_bytes=128 << 20)
    yield checker
    checker.close()


def compile_form(checker: GrammarChecker, form: dict[str, Any]) -> str:
    structured = checked_structured(form)
    assert structured is not None
    result = checker.compile(structured).result
    if isinstance(result, InvalidRequest):
        raise result
    return result


def refused(checker: GrammarChecker, form: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compile_form(checker, form)
    assert caught.value.param == "structured"
    return caught.value.message


def compiler_s(checker: GrammarChecker) -> float:
    """Processor time of the compilers of this process, those that have ended included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = checker._process and psutil.Process(checker._process._process.pid).cpu_times()
    return ended.ru_utime + ended.ru_stime + (alive.user + alive.system if alive else 0.0)


@pytest.mark.parametrize(
    "form", [{"json_schema": {"type": "x" * 9000}}, {"grammar": "start: " + "x" * 9000}], ids=["schema", "grammar"]
)
def test_reason_is_no_longer_than_a_person_reads(checker: GrammarChecker, form: dict[str, Any]) -> None:
    reason = refused(checker, form)
    assert reason.startswith("structured does not compile: ")
    assert len(reason) < 600


GBNF = r"""# moves of a game
root ::= move ("\n" move)* end-mark?
move ::= [1-9] [0-9]{0,2} ". " (pawn | "O-O")
pawn ::= ([a-h] "x")? [a-h] [1-8]
end-mark ::= " #"
"""
LARK = r"""start: move ("\n" move)* " #"?
move: /[1-9][0-9]{0,2}/ ". " (pawn | "O-O")
pawn: (/[a-h]/ "x")? /[a-h][1-8]/
"""


@pytest.mark.parametrize("grammar", [GBNF, LARK], ids=["GBNF", "Lark"])
@pytest.mark.parametrize(
    ("text", "num_bytes", "is_complete"),
    [("1. e4", 5, True), ("12. exd5\n13. O-O #", 18, True), ("1. e9", 4, False), ("0. e4", 0, False)],
)
def test_grammar_is_in_lark_or_in_gbnf(
    checker: GrammarChecker, grammar: str, text: str, num_bytes: int, is_complete: bool
) -> None:
    guidance = pytest.importorskip("llguidance")
    matcher = guidance.LLMatcher(guidance.LLTokenizer("byte"), compile_form(checker, {"grammar": grammar}))
    assert matcher.try_consume_tokens([*text.encode()]) == num_bytes
    assert matcher.is_accepting() == is_complete


def test_error_in_a_gbnf_grammar_says_where_it_is(checker: GrammarChecker) -> None:
    assert "does not compile: Expected ')' at line 1" in refused(checker, {"grammar": 'root ::= ("a"'})
    assert "does not compile" in refused(checker, {"grammar": GBNF.replace("root", "game")})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "form",
    [
        {"json_object": True},
        {"json_schema": nested(20)},
        {"json_schema": {"enum": [f"value {i}" for i in range(4000)]}},
        {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
        {"regex": r"\d{4}-\d{2}"},
        {"grammar": 'start: "a" start | "b"'},
        {"choice": ["a\nb", "é😀", "\\", '"']},
        {"regex": "(a|aa)*b"},
        {"regex": "(x+x+)+y"},
    ],
    ids=lambda form: str(form)[:40],
)
def test_valid_form_compiles(checker: GrammarChecker, form: dict[str, Any]) -> None:
    assert compile_form(checker, form)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"json_schema": {"type": "foo"}}, "Invalid type: foo"),
    "unknown keyword": ({"json_schema": {"not": {"type": "string"}}}, "not"),
    "bad pattern": ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
    "bad expression": ({"regex": "("}, "unclosed group"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "matches nothing": ({"regex": r"[^\s\S]"}, "structured"),
    "unknown rule": ({"grammar": "start: foo"}, "foo"),
    "remote reference": ({"json_schema": {"$ref": "http://127.0.0.1:1/x"}}, "not fetch"),
    "refers to itself": ({"json_schema": {"$ref": "#"}}, "structured"),
    "too deep": ({"json_schema": nested(300)}, "recursion limit"),
    "all combinations": (
        {"json_schema": {"allOf": [{"anyOf": [nested(1), {"properties": {f"b{i}": {}}}]} for i in range(14)]}},
        "too large",
    ),
}


@pytest.mark.parametrize(("form", "reason"), REFUSED.values(), ids=REFUSED)
def test_bad_form_is_refused_with_the_reason(checker: GrammarChecker, form: dict[str, Any], reason: str) -> None:
    assert reason in refused(checker, form)


@pytest.mark.parametrize(
    "form",
    [{"json_schema": {"type": "integer", "multipleOf": 12345677}}, {"regex": "(a{1000}){1000}"}],
    ids=["a million states", "a million repeats"],
)
def test_grammar_that_takes_too_much_is_refused_and_the_next_one_compiles(
    checker: GrammarChecker, form: dict[str, Any]
) -> None:
    compile_form(checker, {"regex": "warm"})
    used_s = compiler_s(checker)
    message = refused(checker, form)
    assert "takes longer than 1.0 s" in message or "128 MiB" in message or "too many" in message
    assert compiler_s(checker) - used_s < 3 * TIMEOUT_S
    assert compile_form(checker, {"regex": "next"})
    assert checker.known(checked_structured(form)).error  # type: ignore[union-attr, arg-type]  # not tried again soon


def test_killed_compiler_does_not_fail_the_next_form(checker: GrammarChecker) -> None:
    compile_form(checker, {"regex": "before"})
    assert checker._process is not None
    checker._process._process.kill()
    checker._process._process.wait()
    assert compile_form(checker, {"regex": "behind"})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_form_whose_compiler_is_disturbed_from_outside_is_compiled_by_another(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It would be refused for a minute, for what it did not do."""
    ask, compilers = grammar_checker._Process.ask, list[int]()

    def ask_and_disturb(process: Any, question: list[str]) -> None:
        compilers.append(process._process.pid)
        if len(compilers) == 1:
            os.kill(process._process.pid, number)
        ask(process, question)

    monkeypatch.setattr(grammar_checker._Process, "ask", ask_and_disturb)
    assert compile_form(checker, {"regex": f"disturbed by {number.name}"})
    assert len(set(compilers)) == 2


def test_form_whose_compilers_are_all_killed_is_refused(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may kill them for lack of memory."""
    monkeypatch.setattr(grammar_checker._Process, "ask", lambda process, _: process._process.kill())
    assert "cannot be compiled in 128 MiB" in refused(checker, {"regex": "killed each time"})


def test_compiler_that_is_killed_at_its_start_is_replaced(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    checker.close()
    monkeypatch.setattr(subprocess, "Popen", start)
    assert compile_form(checker, {"regex": "by the second one"})
    assert len(started) == 2


def test_too_little_memory_is_reported_with_its_size(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, tokenizer_zoo.byte_level())
    checker = GrammarChecker(folder, timeout_s=20.0, memory_bytes=8 << 20)
    try:
        form = {"json_schema": {"type": "integer", "multipleOf": 12345677}}
        assert "cannot be compiled in 8 MiB" in refused(checker, form)
    finally:
        checker.close()


@pytest.mark.parametrize("name", ["metaspace", "word_piece"])
def test_tokenizer_without_bytes_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    checker = GrammarChecker(model_dir(tmp_path, tokenizer_zoo.ALL[name]()), timeout_s=TIMEOUT_S, memory_bytes=64 << 20)
    assert "this model's answers cannot be constrained" in refused(checker, {"regex": "a"})
    checker.close()


def test_model_without_an_end_token_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, tokenizer_zoo.byte_level(), eos_token_ids=())
    checker = GrammarChecker(folder, timeout_s=TIMEOUT_S, memory_bytes=64 << 20)
    assert "no token that ends a sequence" in refused(checker, {"regex": "a"})
    checker.close()


def test_order_of_properties_is_that_of_the_schema(checker: GrammarChecker) -> None:
    grammar = compile_form(checker, {"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}})
    schema = json.loads(grammar)["grammars"][0]["json_schema"]
    assert list(schema["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("options", "is_limited"),
    [
        ({}, True),
        ({"lenient": True}, True),
        ({"whitespace_flexible": False}, False),
        ({"whitespace_pattern": " "}, False),
    ],
)
def test_white_space_is_limited_unless_the_schema_says_otherwise(
    checker: GrammarChecker, options: dict[str, Any], is_limited: bool
) -> None:
    grammar = compile_form(checker, {"json_schema": {"type": "object", "x-guidance": options}})
    compiled = json.loads(grammar)["grammars"][0]["json_schema"]["x-guidance"]
    assert (compiled != options) == is_limited
    assert compiled.items() >= options.items()


def test_pause_of_the_whole_machine_refuses_no_form(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container. The form would be refused for a minute."""
    compile_form(checker, {"regex": "first"})
    assert checker._process is not None
    select, clock, pauses = checker._process._selector.select, time.monotonic, [60.0]

    def pause(timeout: float) -> Any:
        if len(pauses) > 1:
            return select(timeout)
        pauses.append(0.0)
        for module in (grammar_checker, starvation):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock() + pauses[0]))
        return []

    monkeypatch.setattr(checker._process._selector, "select", pause)
    assert compile_form(checker, {"regex": "second"})


def test_form_is_not_refused_while_its_compiler_waits_for_a_processor(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an overloaded machine, where a form takes many times as long."""
    compile_form(checker, {"regex": "first"})
    assert checker._process is not None
    select, clock = checker._process._selector.select, time.monotonic
    waits: list[float] = []

    def wait(timeout: float) -> Any:
        if len(waits) == 3:
            return select(timeout)
        waits.append(timeout)
        return []

    monkeypatch.setattr(checker._process._selector, "select", wait)
    for module in (grammar_checker, starvation):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock() + sum(waits)))
    monkeypatch.setattr(starvation, "run_delays", lambda _: {1: int(sum(waits) * 0.9e9)})
    assert compile_form(checker, {"regex": "second"})


def not_understood(*_: object) -> tuple[str, str]:
    raise ValueError("not JSON")


def test_garbled_output_of_the_compiler_is_not_taken_as_the_next_answer(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library printed between the answers; the delayed answer was then taken as that to the next form."""
    compile_form(checker, {"choice": ["before"]})
    with monkeypatch.context() as patch:
        patch.setattr(grammar_checker._Process, "answer", not_understood)
        with pytest.raises(ValueError, match="not JSON"):
            compile_form(checker, {"choice": ["lost"]})
    assert "other" in compile_form(checker, {"choice": ["other"]})


def test_compiler_that_begins_with_something_else_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library printed while it was imported: each form left one more process behind."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(_: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-S", "-c", "print('hello', flush=True); input()"], **pipes))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    checker = GrammarChecker(tmp_path, timeout_s=TIMEOUT_S, memory_bytes=64 << 20)
    try:
        assert "the compiler does not start" in refused(checker, {"regex": "a"})
        assert [process.poll() is None for process in started] == [False]
    finally:
        for process in started:
            process.kill()
