"""What Python has not, where it was built for an older C library, is called directly."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from triptych.protocol.lifeline import child_environment
from triptych.protocol.system_calls import memfd_create, pidfd_open

MISSING = ["pidfd_open", "memfd_create", "MFD_CLOEXEC", "P_PIDFD"]
WITHOUT = f"""
import os
for name in {MISSING}:
    delattr(os, name)
"""
PIPELINE = """
import signal
from triptych import Driver

with Driver("hash-lm") as driver:
    before = driver.generate([5], max_tokens=3).token_ids
    os.kill(driver.pids["execute"], signal.SIGKILL)
    print(before == driver.generate([5], max_tokens=3, timeout=60).token_ids)
"""


@pytest.fixture(name="old_python", params=[False, True], ids=["as it is", "older library"])
def fixture_old_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MISSING if request.param else ():
        monkeypatch.delattr(os, name)


@pytest.mark.usefixtures("old_python")
def test_process_can_be_waited_for() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        file = pidfd_open(process.pid)
        assert not os.get_inheritable(file)
        assert select.select([file], [], [], 0)[0] == []
        process.communicate()
        assert select.select([file], [], [], 20)[0] == [file]
        os.close(file)


@pytest.mark.usefixtures("old_python")
def test_process_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ProcessLookupError):
        pidfd_open(2**22 + 1)


@pytest.mark.usefixtures("old_python")
def test_file_in_memory_is_written_and_read() -> None:
    file = memfd_create("a name")
    assert not os.get_inheritable(file)
    assert os.pwrite(file, b"bytes", 0) == os.fstat(file).st_size == 5
    assert os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:a name")
    os.close(file)


def test_pipeline_runs_and_recovers_without_them() -> None:
    command = [sys.executable, "-c", WITHOUT + PIPELINE]
    run = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("True\n", 0), run.stderr
