"""kill -9 of the driver: its workers die with it, and another driver continues every accepted request."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.checks import expected, random_prompt
from tests.pipeline.conftest import hash_driver
from tests.pipeline.serving import DriverProcess
from tests.waiting import eventually
from triptych import Client
from triptych.protocol.errors import ConfigError, JournalError

OPTIONS: dict[str, Any] = {"model": "hash-lm", "hash_step_ms": 2.0, "lease_s": 60.0, "max_num_seqs": 16}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    return folder


def test_every_client_gets_its_undisturbed_text_from_three_drivers(run_dir: Path) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng) for _ in range(40)]  # more than may be live at once: some still wait for a credit
    with Client(run_dir) as client:
        streams = [client.submit(prompt, max_tokens=250) for prompt in prompts]
        for _ in range(2):
            with DriverProcess(run_dir, **OPTIONS) as driver:
                driver.wait_ready()
                before = sum(stream.done for stream in streams)
                eventually(lambda before=before: sum(s.done for s in streams) > before or _tokens(client) > 500)  # type: ignore[misc]
                driver.kill()
        with DriverProcess(run_dir, **OPTIONS):
            for prompt, stream in zip(prompts, streams, strict=True):
                assert stream.result(60).token_ids == expected(prompt, 250)


def _tokens(client: Client) -> int:
    return int(client.stats()["summarize"].get("tokens", 0))


def test_restarted_client_resumes_by_id_and_offset(run_dir: Path) -> None:
    with DriverProcess(run_dir, **OPTIONS) as driver, Client(run_dir) as first:
        stream = first.submit([5, 6], max_tokens=400, request_id="both-died")
        delta = next(iter(stream))
        driver.wait_ready()
        driver.kill()
    with DriverProcess(run_dir, **OPTIONS), Client(run_dir) as second:
        rest = second.resume("both-died", num_tokens=len(delta.token_ids), num_chars=len(delta.text))
        assert delta.token_ids + rest.result(60).token_ids == expected([5, 6], 400)


@pytest.mark.parametrize("flush", ["none", "step"])
def test_journal_with_a_path_survives_the_loss_of_the_run_directory(tmp_path: Path, flush: str) -> None:
    """As after a reboot: sockets, board and model card are gone, the journal still exists."""
    options = {**OPTIONS, "journal": str(tmp_path / "journal"), "journal_flush": flush, "journal_flush_ms": 20.0}
    for name in ("before", "after"):
        (tmp_path / name).mkdir(0o700)
    with DriverProcess(tmp_path / "before", **options) as driver, Client(tmp_path / "before") as client:
        stream = client.submit([5, 6], max_tokens=400, request_id="kept")
        delta = next(iter(stream))
        driver.kill()
    with DriverProcess(tmp_path / "after", **options), Client(tmp_path / "after") as client:
        rest = client.resume("kept", num_tokens=len(delta.token_ids), num_chars=len(delta.text))
        assert delta.token_ids + rest.result(60).token_ids == expected([5, 6], 400)


def test_second_driver_on_a_journal_is_refused(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    with (
        hash_driver(journal=journal),
        pytest.raises(ConfigError, match="another driver uses the journal"),
        hash_driver(journal=journal),
    ):
        pass
    with hash_driver(journal=journal) as driver:
        assert driver.generate([1, 2], max_tokens=3).token_ids == expected([1, 2], 3)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"x" * 9000, "is not a journal"), (b"TRIPTYCH", "has 8 bytes")], ids=["foreign", "cut"]
)
def test_file_that_is_not_a_journal_is_refused_and_left_unchanged(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=reason), hash_driver(journal=str(path)):
        pass
    assert path.read_bytes() == content


def test_journal_of_another_model_with_open_requests_is_refused(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    driver = hash_driver(journal=journal, hash_step_ms=5.0, lease_s=60.0).start()
    driver.submit([1, 2], max_tokens=2000).accepted(20)
    driver.stop(mode="keep")
    with (
        pytest.raises(ConfigError, match="1 unanswered requests of another model"),
        hash_driver(journal=journal, model="demo"),
    ):
        pass
