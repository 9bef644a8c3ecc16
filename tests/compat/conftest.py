"""Where third-party clients are installed, and a gateway for them.

The Python that runs the tests is tried first. ``TRIPTYCH_CLIENTS`` may name a folder with more: virtual environments,
and a folder ``node`` in which ``npm install`` was run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.gateway.conftest import Site, site
from triptych import Driver

CLIENTS = Path(os.environ.get("TRIPTYCH_CLIENTS", "/nonexistent"))
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def pythons_with(module: str) -> list[str]:
    """Every interpreter that has the module. Skips the test if there is none."""
    candidates = [sys.executable, *(str(path) for path in sorted(CLIENTS.glob("*/bin/python")))]
    found = [python for python in candidates if not subprocess.call([python, "-c", _FIND, module])]
    return found or pytest.skip(f"{module} is not installed")


def node_folder_with(*modules: str) -> Path:
    """The folder whose ``node_modules`` has the packages. Skips the test if there is none, or no node."""
    folder = CLIENTS / "node"
    missing = [module for module in modules if not (folder / "node_modules" / module).is_dir()]
    if missing:
        pytest.skip(f"TRIPTYCH_CLIENTS names no folder in whose node folder {', '.join(missing)} is installed")
    return folder


@pytest.fixture(scope="package")
def demo() -> Iterator[Site]:
    """A gateway of the model that ships with the package."""
    with (
        Driver("demo", device="cpu", dtype="float32", threads=1, num_pages=1024) as driver,
        site(driver.run_dir) as served,
    ):
        served.driver = driver
        yield served
