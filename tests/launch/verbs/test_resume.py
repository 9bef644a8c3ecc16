"""``triptych generate --resume``: no prompt is answered twice or left out, and no truncated line remains."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Triptych
from tests.launch.test_processes import HASH, process
from tests.waiting import eventually


@pytest.fixture
def resume(triptych: Triptych, run_dir: str, tmp_path: Path) -> Triptych:
    """Run the verb on the shared pipeline, into one file."""
    output = ("--connect", run_dir, "--max-tokens", "4", "--output", str(tmp_path / "out.jsonl"), "--resume")
    return lambda *arguments, stdin=b"": triptych("generate", *output, *arguments, stdin=stdin)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]


def prompts(*names: str) -> bytes:
    return "\n".join(json.dumps({"id": name, "prompt": f"prompt {name}"}) for name in names).encode()


def test_answered_prompts_are_not_sent_again(resume: Triptych, tmp_path: Path) -> None:
    assert resume(stdin=prompts("a", "b")).code == 0
    first = rows_in(tmp_path)
    outcome = resume(stdin=prompts("c", "b", "a"))
    assert outcome.err.startswith("2 of 3 prompts are already answered")
    assert rows_in(tmp_path)[:2] == first
    assert [(row["index"], row["id"]) for row in rows_in(tmp_path)] == [(0, "a"), (1, "b"), (0, "c")]
    assert resume(stdin=prompts("a", "b", "c")) == (0, "", "3 of 3 prompts are already answered\n")


def test_lines_without_ids_are_matched_by_their_position(resume: Triptych, tmp_path: Path) -> None:
    resume(stdin=b"one\ntwo")
    assert resume(stdin=b"one\ntwo\nthree").code == 0
    assert [(row["index"], row["prompt"]) for row in rows_in(tmp_path)] == [(0, "one"), (1, "two"), (2, "three")]


def test_every_choice_of_an_answer_is_kept(resume: Triptych, tmp_path: Path) -> None:
    several = ("--n", "3", "--temperature", "1")
    assert resume(*several, stdin=prompts("a", "b")).code == 0
    first = rows_in(tmp_path)
    assert resume(*several, stdin=prompts("a", "b")) == (0, "", "2 of 2 prompts are already answered\n")
    assert rows_in(tmp_path) == first
    assert [(row["id"], row["choice"]) for row in first] == [(name, index) for name in "ab" for index in range(3)]


def test_prompt_with_missing_choices_is_sent_again(resume: Triptych, tmp_path: Path) -> None:
    lines = b'{"id": "a", "prompt": "x", "n": 3}\n{"id": "b", "prompt": "y"}'
    resume(stdin=lines)
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    assert "1 of 2 prompts are already answered" in resume(stdin=lines).err
    assert [(row["id"], row.get("choice")) for row in rows_in(tmp_path)] == [("b", None), ("a", 0), ("a", 1), ("a", 2)]


def test_failures_are_retried_and_truncated_lines_dropped(resume: Triptych, tmp_path: Path) -> None:
    resume(stdin=b'one\n{"prompt": "two", "top_p": 7}')
    with (tmp_path / "out.jsonl").open("a") as output:
        output.write('{"index": 9, "text": "half of an answer", "error": {"code": "deadline_exceeded"}}\n')
        output.write("[" * 9999 + "\n")  # a line that no JSON reader takes
        output.write('{"index": 2, "prompt": "three", "te')
    assert resume(stdin=b'one\n{"prompt": "two"}\nthree').code == 0
    assert [(row["index"], "text" in row) for row in rows_in(tmp_path)] == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        (b"another", "the answer with index 0 is to another prompt"),
        (b'{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "two prompts have the id 'a'"),
    ],
)
def test_answers_to_other_prompts_are_refused(resume: Triptych, tmp_path: Path, stdin: bytes, words: str) -> None:
    resume(stdin=b"one")
    outcome = resume(stdin=stdin)
    assert outcome.code == 2
    assert words in outcome.err
    assert len(rows_in(tmp_path)) == 1


def test_output_that_is_a_link_stays_a_link(resume: Triptych, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b'{"index": 0, "prompt": "o')
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere")
    assert resume(stdin=b"one").code == 0
    assert (tmp_path / "out.jsonl").is_symlink()
    assert [row["index"] for row in rows_in(tmp_path)] == [0]


def test_full_disk_while_dropping_a_truncated_line_is_named(resume: Triptych, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(b'{"index": 0, "prompt": "o')
    (tmp_path / "out.jsonl.tmp").mkdir()
    outcome = resume(stdin=b"one")
    assert (outcome.code, "out.jsonl.tmp: Is a directory" in outcome.err) == (2, True)


def test_resume_needs_a_file_of_rows(triptych: Triptych, run_dir: str) -> None:
    outcome = triptych("generate", "hi", "--connect", run_dir, "--resume")
    assert (outcome.code, "--resume needs --output with JSON lines" in outcome.err) == (2, True)


def test_batch_continues_after_ctrl_c(tmp_path: Path, resume: Triptych) -> None:
    (tmp_path / "in").write_bytes(prompts(*map(str, range(40))))
    output = tmp_path / "out.jsonl"
    arguments = ["generate", "--file", str(tmp_path / "in"), "--output", str(output), "--max-num-seqs", "2"]
    with process(*arguments, *HASH, "--hash-step-ms", "20", "--max-tokens", "4", "--raw") as running:
        eventually(lambda: output.exists() and output.read_bytes().count(b"\n") >= 4)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=20)
    assert (running.returncode, "interrupted" in errors) == (130, True)
    num_answered = len(rows_in(tmp_path))
    assert 4 <= num_answered < 40
    outcome = resume("--raw", "--file", str(tmp_path / "in"))
    assert f"{num_answered} of 40 prompts are already answered" in outcome.err
    assert sorted(row["index"] for row in rows_in(tmp_path)) == list(range(40))
