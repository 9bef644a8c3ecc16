"""How much memory and how many processors the control groups of this process allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from triptych.protocol import cgroups
from triptych.workers.execute.model.memory import available_bytes
from triptych.workers.execute.model.threads import num_processors

Place = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Put this process into groups whose files have these contents."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))

    def place(membership: str, files: Mapping[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            file = tmp_path / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return place


def test_limits_of_every_parent_group_count(place: Place) -> None:
    above = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 5\ninactive_file 50\n"}
    own = {"ours/memory.max": "max\n", "ours/memory.current": "100\n", "ours/cpu.max": "300000 100000\n"}
    files = own | above | {"cpu.max": "max 100000\n"}
    place("0::/service/ours\n", {f"service/{name}": text for name, text in files.items()})
    assert available_bytes(torch.device("cpu")) == 350
    assert num_processors() == 3


def test_cgroups_v1_are_supported(place: Place) -> None:
    files = {"memory/a/memory.limit_in_bytes": "500\n", "memory/a/memory.usage_in_bytes": "200\n"}
    files |= {"cpu/b/cpu.cfs_quota_us": "250000\n", "cpu/b/cpu.cfs_period_us": "100000\n"}
    place("5:cpu,cpuacct:/b\n4:memory:/a\n", files)
    assert available_bytes(torch.device("cpu")) == 300
    assert num_processors() == 2


@pytest.mark.parametrize("quota", ["50000 100000", "1 100000"])
def test_less_than_a_processor_counts_as_one(place: Place, quota: str) -> None:
    place("0::/\n", {"cpu.max": quota})
    assert num_processors() == 1


def test_without_quotas_all_processors_are_available(place: Place) -> None:
    place("5:cpu,cpuacct:/b\n0::/\n", {"cpu/b/cpu.cfs_quota_us": "-1\n", "cpu/b/cpu.cfs_period_us": "100000\n"})
    assert num_processors() == 64


def test_kernel_without_control_groups_sets_no_limits(place: Place) -> None:
    assert cgroups.groups("cpu") == []
    assert num_processors() == 64
