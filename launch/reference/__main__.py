"""Writes the generated parts of pages: ``python -m triptych.launch.reference docs/cli.md``; without arguments, all."""

from __future__ import annotations

import sys
from pathlib import Path

from .api import api
from .commands import commands
from .settings import settings

DOCS = Path(__file__).resolve().parents[2] / "docs"  # resolved, since the package consists of links
PAGES = {"cli.md": commands, "configuration.md": settings, "python.md": api}


def mark(name: str) -> str:
    """The line before the generated part of a page; everything above it is written by hand."""
    return f"<!-- Everything below is written by python -m triptych.launch.reference docs/{name} -->\n"


def whole(name: str, page: str) -> str:
    """The page with its generated part up to date."""
    return f"{page.partition(mark(name))[0]}{mark(name)}\n{PAGES[name]().strip()}\n"


def main() -> None:
    for path in [Path(given) for given in sys.argv[1:]] or [DOCS / name for name in PAGES]:
        path.write_text(whole(path.name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
