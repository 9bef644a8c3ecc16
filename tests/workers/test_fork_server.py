"""What a fork server refuses, and what it survives."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.protocol.config import PipelineConfig
from triptych.protocol.lifeline import CANNOT_FORK, FORK, READY, child_environment
from triptych.protocol.run_dir import CONFIG_FILE
from triptych.workers import fork_server
from triptych.workers.fork_server import CannotFork

# With a GPU, that is: calls to the driver fail.
IMPORTS_WITHOUT_GPU = """
import os, sys, torch
from pathlib import Path
from triptych.workers import fork_server

def initialise(*_):
    raise AssertionError("CUDA would be initialised")

for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getCurrentRawStream"):
    setattr(torch._C, name, initialise)
torch.cuda._lazy_init = initialise
torch.cuda.device_count = lambda: 1  # which asks NVML
fork_server._import(["triptych.workers.execute"], Path(sys.argv[1]))
assert "transformers.modeling_utils" in sys.modules
try:
    torch.cuda.is_available()
except AssertionError:
    print("which would have been noticed")
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text(PipelineConfig.from_options(model="hash-lm").to_json())
    return tmp_path


def test_server_whose_imports_start_threads_says_so(run_dir: Path) -> None:
    """In a worker these threads would be missing."""
    code = "from triptych.workers import fork_server as f; f.num_threads = lambda: 2; f.main()"
    command = [sys.executable, "-c", code, "--run-dir", str(run_dir), "--parent", str(os.getpid())]
    done = subprocess.run([*command, "--roles", "summarize"], env=child_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (CANNOT_FORK, "workers are not forked: imports have started 1 threads\n")


def test_server_whose_imports_initialise_a_gpu_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a worker it could not be used."""
    monkeypatch.setattr(fork_server, "num_threads", lambda: 1)  # the tests may have others
    with open(run_dir / "nvidia-uvm", "w") as device:
        monkeypatch.setattr(fork_server, "_GPU_IN_USE", (device.name,))
        with pytest.raises(CannotFork, match=r"imports have opened .*/nvidia-uvm"):
            fork_server._import([], run_dir)


@pytest.mark.slow
def test_imports_of_execute_do_not_initialise_a_gpu(tmp_path: Path) -> None:
    config = PipelineConfig.from_options(model="demo", backend="transformers")
    (tmp_path / CONFIG_FILE).write_text(config.to_json())
    command = [sys.executable, "-c", IMPORTS_WITHOUT_GPU, str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "which would have been noticed\n"), done.stderr


def test_environment_is_as_before_the_imports(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    before = dict(os.environ)
    with fork_server._variables({"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        assert (os.environ["OPENBLAS_NUM_THREADS"], os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]) == ("1", "1")
    assert os.environ == before


def serve_orders(errors: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Of two orders, how many were tried, if forking fails with these errors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tried = 0

    def fail() -> int:
        nonlocal tried
        tried += 1
        raise OSError(errors[tried - 1], "clone")

    monkeypatch.setattr(fork_server, "fork_sibling", fail)
    with ours, theirs:
        for _ in errors:
            socket.send_fds(ours, [FORK], [])
        ours.shutdown(socket.SHUT_WR)
        try:
            fork_server._serve(theirs)
        finally:
            assert ours.recv(1) == READY
    return tried


def test_server_goes_on_if_there_is_no_process_left_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve_orders([errno.EAGAIN, errno.ENOMEM], monkeypatch) == 2


def test_server_ends_where_the_system_does_not_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotFork, match="clone"):
        serve_orders([errno.EPERM, errno.EPERM], monkeypatch)
