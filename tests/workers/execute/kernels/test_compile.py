"""Where the kernels' library comes from, and what happens where it cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels.compile import NoCompiler, available_levels, build_library


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one; the kernels themselves are built for the tests that run them."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "library.cpp").write_text("int answer() { return 42; }\n")
    monkeypatch.setattr(compiling, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_library("portable")
    built = library.stat().st_ino
    assert build_library("portable") == library
    assert library.stat().st_ino == built
    assert tmp_path in library.parents


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompiler, match=r"c\+\+"):
        build_library("portable")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "_FLAGS", ["--no-such-flag"])
    with pytest.raises(NoCompiler, match="no-such-flag"):
        build_library("portable")
    assert not list(tmp_path.rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triptych").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoCompiler, match="cannot write"):
        build_library("portable")


def test_every_processor_has_a_level() -> None:
    assert available_levels()[-1] == "portable"
