"""The commands of docs/replay.md, in their order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.launch.conftest import Triptych

PAGE = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_commands_of_the_page_run(triptych: Triptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [arrivals] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "arrivals.jsonl").write_text(arrivals)
    shown = {}
    for command in COMMANDS:
        name, *arguments = shlex.split(command)
        assert name == "triptych"
        code, out, _ = triptych(*arguments)
        assert code == 0, command
        shown[command] = out
    assert len(COMMANDS) == 8
    assert "every step is planned as recorded" in shown[COMMANDS[1]]
    report = json.loads(shown[COMMANDS[4]])
    assert (report["finished"], report["replicas"], report["output_tokens_per_second"] > 0) == (4, 2, True)
    assert all("from token to token" in shown[command] for command in (*COMMANDS[2:4], *COMMANDS[5:]))
