"""What ``make`` says to someone whose Python cannot be used, before it installs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD = f"""#!{sys.executable}
import sys
sys.version_info = (3, 9, 18, "final", 0)
exec(sys.argv[2])
"""
WITHOUT_PIP = f"""#!{sys.executable}
import sys
sys.exit("asked for " + " ".join(sys.argv[1:3]) if sys.argv[1] == "-m" else 0)
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment as ``python -m venv`` leaves it behind where Debian's python3-venv is missing. Its Python does
    nothing, so that nothing can ever be installed.
    """
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to("/bin/false")
    return tmp_path / "venv"


def make(venv: Path, program: str) -> str:
    """What it prints when it fails with this program as its Python."""
    python = venv.parent / "python"
    python.write_text(program)
    python.chmod(0o755)
    command = ["make", f"VENV={venv}", f"PYTHON={python}", f"{venv}/.installed"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    return run.stdout + run.stderr


def test_old_python_is_refused_before_an_environment_is_made_with_it(venv: Path) -> None:
    said = make(venv, OLD)
    assert "Triptych needs Python 3.10 or newer" in said
    assert "is 3.9: delete .venv, if it is there, and make demo PYTHON=python3.12" in said
    assert "-m venv" not in said


def test_environment_without_pip_is_made_again(venv: Path) -> None:
    assert "asked for -m venv" in make(venv, WITHOUT_PIP)
