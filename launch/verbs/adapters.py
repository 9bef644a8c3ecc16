"""``triptych load-adapter`` and ``unload-adapter``: change the LoRA adapters of a running pipeline."""

from __future__ import annotations

from pathlib import Path

from ...driver.control import ask
from ...protocol.lora import parse_modules


def load_adapter(text: str, *, connect: Path) -> int:
    """
    Raises:
        ConfigError: no pipeline runs there, the text is not NAME=PATH, or the adapter cannot be served.
    """
    [module] = parse_modules([text])
    answer = ask(connect.absolute(), "load_adapter", name=module.name, path=str(module.folder.absolute()))
    print(f"{module.name} is served now, ready after {answer['seconds']:.2f} s")
    return 0


def unload_adapter(name: str, *, connect: Path) -> int:
    """
    Raises:
        ConfigError: no pipeline runs there, or the adapter was not loaded at run time.
    """
    answer = ask(connect.absolute(), "unload_adapter", name=name)
    print(f"{name} is no longer served, ready after {answer['seconds']:.2f} s")
    return 0
