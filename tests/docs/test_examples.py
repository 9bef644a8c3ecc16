"""Programs run, and commands are accepted, on the pages that have no test of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCS,
    Block,
    assert_no_text_is_blank,
    blocks,
    parse_triptych,
    run_borrowed,
    shell_environment,
)
from tests.launch.gateway.conftest import Site, site
from triptych import Driver

PAGES = sorted(page.name for page in DOCS.glob("*.md"))
PAGES += sorted(f"../{page.name}" for page in DOCS.parent.glob("*.md"))
SHELL = [(page, block) for page in PAGES for language in ("", "sh") for block in blocks(page, language)]
CALLS = sorted({
    (page, line.removeprefix(".venv/bin/"))
    for page, block in SHELL
    for line in block.text.replace("\\\n", " ").splitlines()
    if re.match(r"(\.venv/bin/)?triptych ", line)
})  # fmt: skip
REQUESTS = [(page, block) for page, block in SHELL if "curl" in block.text and "127.0.0.1:8000/" in block.text]
REQUESTS = [(page, block) for page, block in REQUESTS if page in ("http.md", "../README.md")]
[STRUCTURED] = blocks("structured.md", "python")


@pytest.fixture(scope="module")
def api(demo_driver: Driver) -> Iterator[Site]:
    with site(demo_driver.run_dir, served_model_name=("demo",)) as api:
        yield api


@pytest.mark.parametrize(("page", "call"), CALLS)
def test_documented_command_is_accepted(page: str, call: str) -> None:
    parse_triptych(call)


def test_every_page_with_code_is_tested() -> None:
    assert {"cli.md", "scaling.md", "../README.md", "../SECURITY.md"} <= {page for page, _ in CALLS}
    assert {page for page, _ in REQUESTS} == {"http.md", "../README.md"}


def test_structured_answers_follow_their_schemas(demo_driver: Driver, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    output = run_borrowed(STRUCTURED.text, tmp_path, demo_driver)
    assert_no_text_is_blank(output)
    age, date, choice, total = output.splitlines()[-4:]
    assert 0 <= int(age) <= 120
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert choice in ("yes", "no")
    assert re.fullmatch(r"\d(\+\d){1,3}", total)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("page", "block"), REQUESTS, ids=[block.heading or page for page, block in REQUESTS])
def test_curl_gets_an_answer(api: Site, tmp_path: Path, page: str, block: Block) -> None:
    script = "\n".join(line for line in block.text.splitlines() if not line.startswith("triptych "))
    script = script.replace("http://127.0.0.1:8000", api.url).replace("curl ", "curl --fail --silent --show-error ")
    done = subprocess.run(
        ["sh", "-ec", script], env=shell_environment(tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert '{"error"' not in done.stdout
    assert len(done.stdout) > 100
