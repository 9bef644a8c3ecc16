"""``triptych restart``: replace a worker of a running pipeline, with only a pause for its clients."""

from __future__ import annotations

from pathlib import Path

from ...driver.control import ask


def restart(role: str, *, connect: Path, model: str | None) -> int:
    """
    Raises:
        ConfigError: no pipeline runs there, the role is unknown, or the new worker cannot start.
    """
    model = str(Path(model).absolute()) if model is not None and Path(model).exists() else model
    answer = ask(connect.absolute(), "restart", role=role, model=model)
    print(f"{role} restarted, ready after {answer['seconds']:.2f} s")
    return 0
