"""What the pages refer to exists: files, headings, and the sources that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

ROOT = DOCS.parent
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
PAGES += [ROOT / name for name in ("benchmarks/peers/README.md", "launch/demo_model/README.md")]
DECISIONS = sorted(DOCS.glob("decisions/*.md"))
FOLDERS = ("triptych", "protocol", "driver", "workers", "launch", "tests", "benchmarks")
YOURS = {"lc.py", "tasks.py"}  # named by a page, but written by its reader


def anchors(page: Path) -> set[str]:
    """The anchor of every heading, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_resolves(page: Path) -> None:
    assert broken_links(page) == []


def test_every_link_of_a_decision_resolves() -> None:
    assert {page.name: broken for page in DECISIONS if (broken := broken_links(page))} == {}


def test_every_decision_begins_with_its_number() -> None:
    assert [page.name for page in DECISIONS if not page.read_text("utf-8").startswith(f"# {page.name[:4]}: ")] == []


def test_every_source_that_a_page_names_exists() -> None:
    sources = [f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in ROOT.joinpath(folder).rglob("*.*")]
    known = "\n".join([*sources, *(f"/{file.name}" for file in ROOT.glob("*.py"))]) + "\n"
    named = {
        (page.name, name)
        for page in (*PAGES, *DECISIONS)
        for name in re.findall(r"`([\w./-]+\.(?:py|h|cpp|js|html))`", page.read_text(encoding="utf-8"))
    }
    assert sorted((page, name) for page, name in named if name not in YOURS and f"/{name}\n" not in known) == []
