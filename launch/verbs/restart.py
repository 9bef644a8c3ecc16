"""``triptych restart``: replace a worker of a running pipeline, with only a pause for its clients."""

from __future__ import annotations

import os
from pathlib import Path

from ...driver.control import ask


def restart(role: str, *, connect: Path, model: str | None) -> int:
    """
    Raises:
        ConfigError: no pipeline runs there, the role is unknown, or the new worker cannot start.
    """
    if model is not None and os.path.exists(model):
        model = str(Path(model).absolute())
    answer = ask(connect.absolute(), "restart", role=role, model=model)
    print(f"{role} restarted, ready after {answer['seconds']:.2f} s")
    if model is not None:
        print(f"put --model {model} into the settings of the service, too: a later start with another may be refused")
    return 0
