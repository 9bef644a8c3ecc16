"""Adapters over HTTP: each is a model with its own name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.adapters import make_nominal_adapter
from tests.launch.gateway.conftest import Site, site
from tests.pipeline.checks import assert_quiet, expected
from tests.waiting import eventually
from triptych import Driver
from triptych.launch.gateway import adapter_routes

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
QUESTION = [{"role": "user", "content": "what?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "max_tokens": 8, "temperature": 0},
    RESPONSES: {"input": "what?", "max_output_tokens": 8, "temperature": 0},
    MESSAGES: {"messages": QUESTION, "max_tokens": 8, "temperature": 0},
    COMPLETIONS: {"prompt": "what?", "max_tokens": 8, "temperature": 0},
}


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nominal_adapter(tmp_path_factory.mktemp("adapters") / "rude")


@pytest.fixture(name="adapted", scope="module")
def fixture_adapted(folder: Path) -> Iterator[Site]:
    with (
        Driver("hash-lm", lora_modules=[f"rude={folder}", f"team/kind={folder}"], lease_s=5.0) as driver,
        site(driver.run_dir, served_model_name=("base", "other"), lora_root=str(folder.parent)) as api,
    ):
        api.driver = driver
        yield api
        assert_quiet(driver)


def test_adapters_are_listed_after_their_base_model(adapted: Site, folder: Path) -> None:
    models = adapted.http.get("/v1/models").json()["data"]
    origins = [(model["id"], model["root"], model["parent"]) for model in models]
    path = str(folder)
    assert origins == [
        ("base", "hash-lm", None), ("other", "hash-lm", None), ("rude", path, "base"), ("team/kind", path, "base"),
    ]  # fmt: skip
    assert adapted.http.get("/v1/models/team/kind").json()["parent"] == "base"


@pytest.mark.parametrize("path", BODIES)
def test_model_field_selects_the_adapter(path: str, adapted: Site) -> None:
    replies = [adapted.ask(path, **BODIES[path], model=name) for name in ("base", "rude", "team/kind", "other")]
    assert [reply["model"] for reply in replies] == ["base", "rude", "team/kind", "other"]
    answers = [_answer(path, reply) for reply in replies]
    assert answers[0] == answers[3]
    assert len(set(map(repr, answers))) == 3


def _answer(path: str, reply: dict[str, Any]) -> Any:
    if path == RESPONSES:
        return reply["output"][0]["content"][0]["text"]
    if path == MESSAGES:
        return reply["content"][0]["text"]
    choice = reply["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def test_each_adapter_gives_its_own_answers(adapted: Site) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    for number, name in enumerate(("base", "rude", "team/kind")):
        reply = adapted.ask(COMPLETIONS, **body, model=name)
        assert reply["choices"][0]["token_ids"] == expected([5, 6, 7], 8, adapter=number)
    lines = adapted.http.post(COMPLETIONS, json={**body, "model": "rude", "stream": True}).text
    assert '"model":"rude"' in lines


def test_decision_is_made_by_the_requested_adapter(adapted: Site) -> None:
    body = {"state": "x", "questions": [{"question": "y?", "type": "choice", "options": ["a", "b", "c"]}]}
    # The hash LM scores no options: it names the one token that it would choose, which is the adapter's.
    texts = [adapted.refusal("/v1/decisions", **body, model=name)[1]["message"] for name in ("base", "rude", "base")]
    assert "it is so sure of token" in texts[0]
    assert texts[0] == texts[2] != texts[1]


def test_unknown_model_name_is_a_404(adapted: Site) -> None:
    status, error = adapted.refusal(CHAT, messages=QUESTION, model="polite")
    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"].endswith("known are: base, other, rude, team/kind")


def test_requests_are_counted_per_adapter(adapted: Site) -> None:
    def count(name: str) -> float:
        lines = adapted.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("triptych_adapter_requests_total") and f'"{name}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    before = count("rude")
    adapted.ask(CHAT, **BODIES[CHAT], model="rude")
    eventually(lambda: count("rude") > before)  # earlier requests may be counted only now


def told_to_schedulers(api: Site) -> dict[str, str]:
    """The labels by which a scheduler in front of several replicas sees which of them have an adapter."""
    found = text_string_to_metric_families(api.http.get("/metrics").text)
    [info] = [sample for family in found for sample in family.samples if sample.name == "vllm:lora_requests_info"]
    assert abs(info.value - time.time()) < 60  # the latest counts
    return info.labels


def test_schedulers_see_the_adapters_of_a_replica(adapted: Site) -> None:
    assert told_to_schedulers(adapted) == {
        "model_name": "base", "max_lora": "64", "running_lora_adapters": "rude,team/kind", "waiting_lora_adapters": "",
    }  # fmt: skip


def test_adapters_are_loaded_and_unloaded(adapted: Site, folder: Path) -> None:
    loaded = adapted.http.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "rude"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert adapted.http.get("/v1/models/new").json()["root"] == str(folder)
    reply = adapted.ask(COMPLETIONS, prompt=[5, 6, 7], max_tokens=8, temperature=0, return_token_ids=True, model="new")
    assert reply["choices"][0]["token_ids"] == expected([5, 6, 7], 8, adapter=3)
    again = adapted.refusal("/v1/load_lora_adapter", lora_name="new", lora_path="rude")
    assert (again[0], again[1]["message"]) == (400, "the adapter 'new' is already loaded")
    assert "new" in told_to_schedulers(adapted)["running_lora_adapters"].split(",")
    gone = adapted.http.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert adapted.refusal(COMPLETIONS, prompt="x", model="new")[0] == 404
    assert adapted.refusal("/v1/unload_lora_adapter", lora_name="new")[0] == 404
    text = adapted.refusal("/v1/unload_lora_adapter", lora_name="rude")[1]["message"]
    assert "'rude' comes from the settings" in text
    eventually(lambda: adapted.http.get("/ready").status_code == 200)


def test_changes_of_adapters_take_one_thread_at_a_time(adapted: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop has six threads on two processors, which also load tokenizers and encode long replies."""
    num_open, num_asked, go_on = adapted.gateway.counters.num_open, 0, threading.Event()

    def wait(*_: object, **__: object) -> None:
        nonlocal num_asked
        num_asked += 1
        assert go_on.wait(60)

    monkeypatch.setattr(adapter_routes, "ask", wait)
    body = {"lora_name": "new", "lora_path": "rude"}
    with ThreadPoolExecutor(3) as pool:
        posts = [pool.submit(adapted.post, "/v1/load_lora_adapter", **body) for _ in range(3)]
        eventually(lambda: num_asked and adapted.gateway.counters.num_open == num_open + 3)
        assert adapted.ask("/tokenize", prompt="x", model="base")["count"] > 0
        assert num_asked == 1
        go_on.set()
        assert [post.result(20).status_code for post in posts] == [200] * 3
    assert num_asked == 3


@pytest.mark.parametrize("path", ["/etc", "..", "../other", ".", "", "nowhere", "rude/../..", "out", "loop", "a\0b"])
def test_adapters_outside_the_root_are_refused(path: str, adapted: Site, folder: Path) -> None:
    for name, target in (("out", folder.parent.parent), ("loop", folder.parent / "loop")):
        with suppress(FileExistsError):
            (folder.parent / name).symlink_to(target)
    status, error = adapted.refusal("/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert (status, error["param"]) == (400, "lora_path")


def test_adapter_cannot_take_the_model_s_name(adapted: Site) -> None:
    status, error = adapted.refusal("/v1/load_lora_adapter", lora_name="other", lora_path="rude")
    assert (status, error["param"]) == (400, "lora_name")


def test_without_a_root_no_adapter_is_loaded(api: Site) -> None:
    for path, body in (("load", {"lora_name": "a", "lora_path": "/"}), ("unload", {"lora_name": "a"})):
        status, error = api.refusal(f"/v1/{path}_lora_adapter", **body)
        assert (status, error["code"]) == (403, "not_allowed")
