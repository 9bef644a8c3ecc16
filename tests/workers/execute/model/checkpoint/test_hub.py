"""A model that is not a directory is downloaded from the hub, or the error says in one sentence why not."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.find import find_checkpoint
from triptych.workers.execute.model.checkpoint.hub import WAITS_S, fetch

UNREACHABLE = errors.LocalEntryNotFoundError("An error happened. Got: ConnectError: no route to host")


class BrokenConnection(Exception):
    """Like the errors of the HTTP client in the hub's library: not an OSError."""


def response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


class Hub:
    """Raises these errors, one after the other, and then gives the checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Exception) -> None:
        self.answers = list(answers)
        self.waits_s: list[float] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def _download(self, model: str, **_: object) -> str:
        if self.answers:
            raise self.answers.pop(0)
        return f"/cache/{model}"

    def fetch(self) -> Path:
        return fetch("someone/something", sleep=self.waits_s.append)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.RepositoryNotFoundError("404", response=response(404)), "the hub has no such repository"),
        (errors.RepositoryNotFoundError("401", response=response(401)), "for a private one set HF_TOKEN"),
        (errors.GatedRepoError("403", response=response(403)), "accept its terms"),
        (errors.HfHubHTTPError("403 Forbidden\nmore", response=response(403)), "the hub refuses it: 403 Forbidden$"),
        (errors.HFValidationError("Repo id must use ..."), "it is not a valid hub id: Repo id"),
        (OSError(errno.ENOSPC, "No space left on device"), "its files cannot be stored: .*No space left"),
    ],
    ids=["not found", "private", "gated", "refused", "bad name", "full disk"],
)
def test_final_refusal_of_the_hub_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    hub = Hub(monkeypatch, error)
    with pytest.raises(ConfigError, match=f"'someone/something' is not a local directory, and .*{reason}"):
        hub.fetch()
    assert hub.waits_s == []


@pytest.mark.parametrize(
    "error",
    [
        UNREACHABLE,
        BrokenConnection("the connection broke"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        errors.HfHubHTTPError("503 Busy", response=response(503)),
        errors.HfHubHTTPError("429 Too many", response=response(429)),
    ],
    ids=["unreachable", "broken", "reset", "busy", "too many"],
)
def test_short_network_failure_does_not_fail_the_start(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    hub = Hub(monkeypatch, error)
    assert hub.fetch() == Path("/cache/someone/something")
    assert hub.waits_s == [WAITS_S[0]]


def test_hub_that_stays_unreachable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, *[UNREACHABLE] * 3)
    with pytest.raises(ConfigError, match="the hub cannot be reached: An error happened"):
        hub.fetch()
    assert hub.waits_s == list(WAITS_S)


def test_hub_is_not_contacted_when_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'someone/something' is not a local directory, and .*HF_HUB_OFFLINE is set"):
        find_checkpoint("someone/something")
