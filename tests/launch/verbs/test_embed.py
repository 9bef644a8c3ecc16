"""``triptych embed``: vectors as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.conftest import Triptych
from triptych import Client


def test_texts_and_lines_are_embedded(triptych: Triptych, run_dir: str, tmp_path: Path) -> None:
    lines = ["plain", json.dumps({"prompt_token_ids": [5, 6], "id": "b", "dimensions": 3}), '{"prompt": 1}']
    (tmp_path / "in").write_text("\n".join(lines))
    outcome = triptych("embed", "--connect", run_dir, "--file", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    first, second, third = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    with Client(run_dir) as client:
        assert first["embedding"] == client.embed("plain").values.tolist()
        assert second["embedding"] == client.embed([5, 6], dimensions=3).values.tolist()
    assert (first["prompt"], second["id"], first["usage"]["prompt_tokens"]) == ("plain", "b", 5)
    assert third["error"]["param"] == "prompt"
    assert outcome.code == 1
    assert " 7 tokens in " in outcome.err


@pytest.mark.parametrize(("dimensions", "code"), [("4", 0), ("0", 1)])
def test_dimensions_are_a_flag(triptych: Triptych, run_dir: str, dimensions: str, code: int) -> None:
    outcome = triptych("embed", "--connect", run_dir, "--dimensions", dimensions, "hello")
    assert outcome.code == code
    assert len(json.loads(outcome.out).get("embedding", ())) == (0 if code else 4)


def test_instruction_is_a_flag(triptych: Triptych, run_dir: str) -> None:
    outcome = triptych("embed", "--connect", run_dir, "--prompt-name", "query", "hello")
    with Client(run_dir) as client:
        assert json.loads(outcome.out)["embedding"] == client.embed("find: hello").values.tolist()
