"""Links between the pages lead to existing files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

PAGES = [*sorted(DOCS.glob("*.md")), *(DOCS.parent / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md"))]


def anchors(page: Path) -> set[str]:
    """The anchor of every heading, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"
