"""launch/deploy is valid by Kubernetes' schema, and matches the program that it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from triptych.launch.cli import app
from triptych.protocol.config import ServiceConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "launch" / "deploy"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}
POD = BY_KIND["Deployment"]["spec"]["template"]
[CONTAINER] = POD["spec"]["containers"]
INSTRUCTIONS = [
    line.split(None, 1)
    for line in (FOLDER / "Dockerfile").read_text().splitlines()
    if line and not line.startswith("#")
]


def serve_flags(arguments: list[str]) -> dict[str, Any]:
    """The settings that the command line makes from a container's arguments."""
    verb, *flags = arguments
    return dict(typer.main.get_command(app).commands[verb].make_context(verb, flags).params)  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS, ids=list(BY_KIND))
def test_manifest_is_valid_by_the_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_schema_refuses_a_misspelt_field() -> None:
    wrong = json.loads(json.dumps(BY_KIND["Deployment"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_arguments_are_accepted_by_serve() -> None:
    flags = serve_flags(CONTAINER["args"])
    assert flags["http"].rpartition(":")[2] == str(CONTAINER["ports"][0]["containerPort"])


@pytest.mark.parametrize(("probe", "path"), [("startup", "/ready"), ("readiness", "/ready"), ("liveness", "/health")])
def test_each_probe_uses_the_right_route(probe: str, path: str) -> None:
    asked = CONTAINER[f"{probe}Probe"]["httpGet"]
    assert (asked["path"], asked["port"]) == (path, CONTAINER["ports"][0]["name"])
    assert f"GET `{path}`" in (ROOT / "docs" / "http.md").read_text()


def test_grace_period_covers_the_hook_and_the_drain() -> None:
    hook = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain = serve_flags(CONTAINER["args"])["drain_timeout"]
    assert hook + drain + 10 <= POD["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("probe", ["startup", "liveness"])
def test_pod_is_not_restarted_before_the_driver_itself_gives_up_loading(probe: str) -> None:
    asked = CONTAINER[f"{probe}Probe"]
    lasts_s = asked["periodSeconds"] * asked["failureThreshold"]
    limit_s = serve_flags(CONTAINER["args"])["start_timeout_s"]
    assert limit_s + 30 <= lasts_s <= 1.2 * limit_s


def test_shared_memory_is_large_enough_for_the_journal() -> None:
    [volume] = [v for v in POD["spec"]["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    [mount] = [m for m in CONTAINER["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["mountPath"] == "/dev/shm"
    service = ServiceConfig()
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
    assert size > 2 * (service.arena_bytes + 512 * service.max_records)


def test_every_mount_is_a_volume_and_every_selector_finds_the_pods() -> None:
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["spec"]["volumes"]}
    labels = POD["metadata"]["labels"].items()
    selectors = [BY_KIND[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    for selector in (*selectors, BY_KIND["Service"]["spec"]["selector"]):
        assert selector.items() <= labels
    assert BY_KIND["Service"]["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]


def test_pod_has_only_the_permissions_it_needs() -> None:
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    context = CONTAINER["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert {"cpu", "memory"} <= CONTAINER["resources"]["requests"].keys()


def test_image_runs_as_the_user_of_the_manifest_without_a_shell() -> None:
    words = {name: rest for name, rest in INSTRUCTIONS if name in ("USER", "ENTRYPOINT", "CMD", "STOPSIGNAL")}
    context = POD["spec"]["securityContext"]
    assert words["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert json.loads(words["ENTRYPOINT"]) == ["triptych"]
    assert serve_flags(json.loads(words["CMD"]))["http"] == "0.0.0.0:8000"
    assert words["STOPSIGNAL"] == "SIGTERM"


def test_health_check_of_the_image_waits_for_a_start_and_takes_one_frame() -> None:
    [check] = [rest for name, rest in INSTRUCTIONS if name == "HEALTHCHECK"]
    options, _, command = check.partition(" CMD ")
    program, *arguments = json.loads(command)
    assert (program, serve_flags(arguments)["once"]) == ("triptych", True)
    [minutes] = re.findall(r"--start-period=(\d+)m", options)
    assert int(minutes) * 60 > serve_flags(CONTAINER["args"])["start_timeout_s"]


def test_image_copies_existing_files_that_are_in_the_build_context() -> None:
    sources = [
        word for name, rest in INSTRUCTIONS if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed


def test_final_image_has_a_compiler_for_the_kernels() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert re.search(r"apt-get install .*\bg\+\+", text.rpartition("\nFROM ")[2])


def test_image_installs_existing_extras() -> None:
    [extras] = re.findall(r"'\.\[(.*)\]'", (FOLDER / "Dockerfile").read_text())
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)
