"""Writes what is generated of pages: ``python -m triptych.launch.reference docs/cli.md``; of all if none is named."""

from __future__ import annotations

import sys
from pathlib import Path

from .api import api
from .commands import commands
from .settings import settings

DOCS = Path(__file__).resolve().parents[2] / "docs"  # the package is made of links
PAGES = {"cli.md": commands, "configuration.md": settings, "python.md": api}


def mark(name: str) -> str:
    """What stands before the generated part of a page; what is above it is written by hand."""
    return f"<!-- Everything below is written by python -m triptych.launch.reference docs/{name} -->\n"


def whole(name: str, page: str) -> str:
    """The page as it should be."""
    return f"{page.partition(mark(name))[0]}{mark(name)}\n{PAGES[name]().strip()}\n"


def main() -> None:
    for path in [Path(given) for given in sys.argv[1:]] or [DOCS / name for name in PAGES]:
        path.write_text(whole(path.name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
