"""The description on PyPI: README.md, whose links also work there. Everything else is in pyproject.toml.

A link to a file of the repository leads to ``[project.urls] Repository``. While there is no such address, only its text
is left.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:)(?P<target>[^)]+)\)")
_REPOSITORY = re.compile(r'^Repository = "(?P<address>[^"]+)"$', re.MULTILINE)


def description(readme: str, repository: str | None) -> str:
    """The page without relative links. ``repository`` is its address on GitHub."""

    def absolute(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["image"] else link["text"]
        place = "" if link["target"].startswith("#") else "/raw/main/" if link["image"] else "/blob/main/"
        return f"{link['image']}[{link['text']}]({repository}{place}{link['target']})"

    return _LINK.sub(absolute, readme)


if __name__ == "__main__":
    found = _REPOSITORY.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), found and found["address"]),
        long_description_content_type="text/markdown",
    )
