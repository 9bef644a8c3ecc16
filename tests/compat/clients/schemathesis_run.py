"""schemathesis sends valid and invalid requests made from /openapi.json: ``python schemathesis_run.py URL``.

The check that valid requests get a 200 is left out: which fields exclude each other, and which token ids exist, is not
in the schema. Such requests get a 400 that names the field, and this is checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from checks import run

EXAMPLES = 20
SECONDS = 60
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")


def whole_document(url: str) -> None:
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json",
        "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--max-time", str(SECONDS),
        "--exclude-checks", "positive_data_acceptance", "--seed", "1", "--request-timeout", "20", "--no-color",
        "--continue-on-failure",
    ]  # fmt: skip
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    with tempfile.TemporaryDirectory() as folder:  # it stores its findings in the working directory
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    print("\n".join(line for line in done.stdout.splitlines() if "generated" in line))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


if __name__ == "__main__":
    run(f"schemathesis {version('schemathesis')}", [whole_document], sys.argv[1])
