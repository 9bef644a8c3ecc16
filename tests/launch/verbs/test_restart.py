"""``triptych restart`` says what it did, and what is left to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.launch.verbs import restart as verb


@pytest.mark.parametrize("model", [None, "other"])
def test_other_weights_have_to_be_in_the_settings_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str | None
) -> None:
    """Otherwise a driver that is started after a crash is refused, with requests of these weights open."""
    monkeypatch.setattr(verb, "ask", lambda *_, **__: {"seconds": 1.0})
    assert verb.restart("execute", connect=Path("run"), model=model) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first == "execute restarted, ready after 1.00 s"
    assert [line.partition(" into ")[0] for line in more] == ["put --model other"] * (model is not None)
