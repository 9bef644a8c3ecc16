"""How the program starts, and how it ends when it is interrupted before it has started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triptych.launch import cli

# Ctrl-C while the module is looked up, which is in the middle of an import.
INTERRUPT_AT = """
import importlib, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
package, module = sys.argv[1:]
class Interrupt:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
main = importlib.import_module(package + ".__main__").main
main()
"""


@pytest.mark.parametrize(
    ("package", "module"),
    [("triptych.launch", "triptych.launch.flags.derived"), ("triptych.launch.demo", "triptych.driver.driver")],
    ids=["program", "demo"],
)
def test_ctrl_c_while_the_program_is_imported_exits_silently(package: str, module: str) -> None:
    command = [sys.executable, "-c", INTERRUPT_AT, package, module]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Error calling __set_name__")], ids=repr)
def test_ctrl_c_while_a_verb_is_imported_exits_silently(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(_: object) -> None:
        raise error from None if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 130


@pytest.mark.parametrize("package", ["triptych", "triptych.launch"])
def test_python_m_runs_the_command_line(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("triptych ")
