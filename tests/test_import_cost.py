"""Importing is cheap and does not import torch: programs that embed a driver or wait for a model start at once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODULES = [
    "triptych",
    "triptych.driver.async_driver",  # and with it the driver and both clients
    "triptych.workers.prepare.process",
    "triptych.workers.summarize.process",
]
HEAVY = ("torch", "transformers", "huggingface_hub", "safetensors")
LIMIT_S = 0.5
PROBE = """
import importlib, json, sys, time
start = time.process_time()
importlib.import_module(sys.argv[1])
print(json.dumps([time.process_time() - start, [name for name in sys.argv[2:] if name in sys.modules]]))
"""


def import_in_a_new_process(module: str) -> tuple[float, list[str]]:
    """Seconds of processor time, and which heavy libraries were imported."""
    command = [sys.executable, "-c", PROBE, module, *HEAVY]
    seconds, heavy = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return seconds, heavy


@pytest.mark.parametrize("module", MODULES)
def test_importing_is_fast_and_imports_no_torch(module: str) -> None:
    # The best of a few attempts: load of the machine is not the package's fault.
    for _ in range(4):
        seconds, heavy = import_in_a_new_process(module)
        assert heavy == []
        if seconds < LIMIT_S:
            return
    raise AssertionError(f"importing {module} took {seconds:.2f} s of processor time, the limit is {LIMIT_S}")


def test_missing_model_is_reported_without_importing_torch() -> None:
    code = """
import sys
from triptych.protocol.config import ModelConfig
from triptych.workers.execute import loading
try:
    loading.find_folders(ModelConfig(model="/no/such/model"))
except Exception as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "model directory /no/such/model does not exist False\n"


def test_every_public_name_can_be_imported() -> None:
    code = "import triptych; assert all(getattr(triptych, name) for name in triptych.__all__)"
    subprocess.run([sys.executable, "-c", code], check=True)
