"""The source distribution, from which others build the wheel: whole, with documentation, and without half a suite."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

import triptych

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "benchmarks")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarfile.TarFile]:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=IGNORED)
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / done.stdout.splitlines()[-1]) as archive:
        yield archive


@pytest.fixture(scope="module")
def names(archive: tarfile.TarFile) -> set[str]:
    """Of the files in the archive, without its own folder."""
    return {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in archive if member.isfile()}


def test_every_source_that_works_without_a_checkout_is_in_it(names: set[str]) -> None:
    folders = ("protocol", "driver", "workers", "launch")
    sources = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    for_checkouts = {path for path in sources if path.startswith(("launch/reference/", "launch/demo_model/training/"))}
    assert len(for_checkouts) > 8
    found = {name.removeprefix("triptych/") for name in names if name.endswith(".py")}
    assert found == (sources - for_checkouts) | {"setup.py", "__init__.py", "__main__.py"}


def test_what_the_wheel_needs_beside_sources_is_in_it(names: set[str]) -> None:
    files = ["launch/demo_model/checkpoint/model.safetensors", "launch/gateway/page/index.html", "py.typed"]
    files += [f"workers/execute/kernels/src/{path.name}" for path in ROOT.glob("workers/execute/kernels/src/*")]
    assert {f"triptych/{file}" for file in files} - names == set()


def test_documentation_and_licence_are_in_it(names: set[str]) -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*") if path.is_file()}
    files = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "NOTICE", "constraints.txt"}
    assert (pages | files) - names == set()


def test_no_part_of_the_suite_is_in_it(names: set[str]) -> None:
    assert not [name for name in names if name.startswith("tests/")]


BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def relative_links(page: str) -> list[str]:
    return re.findall(r"\]\((?!https://)[^)]+\)", BLOCK.sub("", page))


def test_metadata_has_the_version_and_no_link_that_only_the_repository_resolves(archive: tarfile.TarFile) -> None:
    [member] = [member for member in archive if re.fullmatch(r"[^/]+/PKG-INFO", member.name)]
    file = archive.extractfile(member)
    assert file is not None
    fields, _, page = file.read().decode().partition("\n\n")
    assert f"\nVersion: {triptych.__version__}\n" in fields
    assert "\nDescription-Content-Type: text/markdown\n" in fields
    assert page.startswith("# Triptych\n")
    assert relative_links(page) == []


def test_links_and_images_of_the_description_lead_to_the_address_of_the_repository() -> None:
    readme, address = (ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/own/triptych"
    page = runpy.run_path(str(ROOT / "setup.py"))["description"](readme, address)
    assert relative_links(page) == []
    assert f"({address}/blob/main/docs/recovery.md)" in page
    assert f"]({address}/raw/main/docs/images/page.png)" in page
    assert f"({address}#limitations)" in page
    assert BLOCK.findall(page) == BLOCK.findall(readme)
