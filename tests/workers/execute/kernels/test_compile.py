"""Where the kernels' library comes from, and what happens if it cannot be built."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.proc import is_alive
from tests.waiting import eventually
from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels import library as libraries
from triptych.workers.execute.kernels.compile import (
    LEVELS,
    SOURCES,
    NoCompiler,
    NoPlace,
    available_levels,
    build_library,
    library_name,
)
from triptych.workers.execute.kernels.library import load_library
from triptych.workers.execute.user_cache import cache_folder, making


@pytest.fixture
def short_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources: the real kernels are built by the tests that run them."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "library.cpp").write_text(
        'int part(); extern "C" __attribute__((visibility("default"))) int whole() { return 2 * part(); }\n'
    )
    (sources / "part.cpp").write_text("int part() { return 21; }\n")
    monkeypatch.setattr(compiling, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("short_source")
def test_library_is_built_once(tmp_path: Path) -> None:
    library = build_library("portable")
    assert ctypes.CDLL(str(library)).whole() == 42
    built = library.stat().st_ino
    assert build_library("portable") == library
    assert library.stat().st_ino == built
    assert tmp_path in library.parents


@pytest.mark.usefixtures("short_source")
def test_library_that_was_not_used_for_long_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_NUM_KEPT", 1)
    old = build_library("portable")
    os.utime(old, (0, 0))
    monkeypatch.setattr(compiling, "_FLAGS", [*compiling._FLAGS, "-DANOTHER"])
    assert build_library("portable") != old
    assert not old.exists()


def give_away(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user; only root can, so for others this process becomes another user's."""
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        os.chown(library, 12345, -1)


@pytest.mark.usefixtures("short_source")
def test_library_of_another_user_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run as this user, who may be root with the environment of somebody else."""
    library = build_library("portable")
    library.write_bytes(b"anything")
    give_away(library, monkeypatch)
    assert ctypes.CDLL(str(build_library("portable"))).whole() == 42


@pytest.mark.usefixtures("short_source")
def test_library_of_another_user_that_cannot_be_replaced_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = build_library("portable")
    give_away(library, monkeypatch)

    def refuse(_self: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(compiling, "_build", lambda level, place: place)
    assert build_library("portable", spare_cache=tmp_path / "spare").parents[1] == tmp_path / "spare"


@pytest.mark.usefixtures("short_source")
def test_library_that_cannot_be_loaded_is_built_again() -> None:
    library = build_library("portable")
    library.write_bytes(b"")
    libraries._open("portable")
    assert library.stat().st_size


@pytest.mark.usefixtures("short_source")
def test_new_library_that_cannot_be_loaded_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty.so").touch()
    monkeypatch.setattr(libraries, "build_library", lambda level, spare_cache: tmp_path / "empty.so")
    with pytest.raises(NoCompiler, match="the kernels cannot be loaded"):
        libraries._open("portable")


@pytest.mark.usefixtures("short_source")
def test_library_is_all_that_is_left_of_a_build() -> None:
    library = build_library("portable")
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.usefixtures("short_source")
def test_build_waits_for_no_build_of_another_library() -> None:
    """Of another level, or of another version."""
    folder = cache_folder() / "kernels"
    with making(folder / "other.so"):
        build_library("portable")


def test_compiler_and_what_it_started_end_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    """Otherwise the next process would compile beside them."""
    code = (
        "import sys; from triptych.workers.execute.kernels.compile import _run; _run(sys.argv[2:], scratch=sys.argv[1])"
    )
    started = 'sleep 60 & echo $$ $! > "$TMPDIR/new"; mv "$TMPDIR/new" "$TMPDIR/started"; wait'
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, "/bin/sh", "-c", started]) as process:
        eventually((tmp_path / "started").exists)
        process.kill()
    compilers = [int(pid) for pid in (tmp_path / "started").read_text().split()]
    assert len(compilers) == 2
    eventually(lambda: not any(map(is_alive, compilers)))


def touch_output(command: list[str | Path], *, scratch: str) -> None:
    Path(command[-1]).touch()


def test_library_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss, a part of it would end each process that loads it, at every start."""
    flushed: list[str] = []
    monkeypatch.setattr(compiling, "_run", touch_output)
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr(os, "replace", lambda new, _: flushed.append(f"then {new}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_library("portable")
    assert flushed[1] == f"then {flushed[0]}"


def test_source_that_takes_longest_is_compiled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def run(command: list[str | Path], *, scratch: str) -> None:
        touch_output(command, scratch=scratch)
        compiled.extend(file.name for file in command if isinstance(file, Path) and file.suffix == ".cpp")

    monkeypatch.setattr(compiling, "_run", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_library("portable")
    assert compiled[0] == "int8.cpp"
    assert set(compiled) == {file.name for file in SOURCES.glob("*.cpp")}


@pytest.mark.usefixtures("short_source")
def test_process_goes_on_with_the_sources_that_it_has_read() -> None:
    """As one that was forked with its imports done, when the package has been upgraded."""
    before = library_name("portable")
    (compiling.SOURCES / "part.cpp").write_text("int part() { return 0; }\n")
    assert library_name("portable") == before
    assert ctypes.CDLL(str(build_library("portable"))).whole() == 42


def test_name_depends_on_the_machine_and_not_on_the_compiler_s_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library_name("portable")
    compiler = shutil.which("c++")
    assert compiler is not None
    (tmp_path / "c++").symlink_to(compiler)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert library_name("portable") == before
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert library_name("portable") != before


@pytest.mark.usefixtures("short_source")
def test_feature_that_the_compiler_does_not_know_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a processor newer than the system's compiler."""
    monkeypatch.setattr(compiling, "_processor_flags", lambda: {"avx_future"})
    monkeypatch.setattr(compiling, "_WELCOME", {"portable": ("avx_future",)})
    assert "-mavxfuture" not in compiling.compile_options("portable")
    build_library("portable")


def test_slower_kernels_are_used_if_the_compiler_cannot_build_the_fastest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best = available_levels()[0]
    monkeypatch.setitem(LEVELS, "future", ("no-such-instructions",))
    monkeypatch.setattr(compiling, "available_levels", lambda: ["future", best])
    assert load_library().level == best
    assert f"using the {best} kernels, faster ones cannot be compiled" in caplog.text


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompiler, match=r"c\+\+"):
        build_library("portable")


def test_compiler_error_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "_FLAGS", ["--no-such-flag"])
    with pytest.raises(NoCompiler, match="no-such-flag"):
        build_library("portable")
    assert not list(tmp_path.rglob("*.so"))


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triptych").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoCompiler, match="cannot write"):
        build_library("portable")


@pytest.fixture
def unwritable_cache(short_source: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("unwritable_cache")
def test_without_a_cache_a_pipeline_builds_its_library_once(tmp_path: Path) -> None:
    library = build_library("portable", spare_cache=tmp_path / "run")
    assert library.is_relative_to(tmp_path / "run")
    built = library.stat().st_ino
    assert build_library("portable", spare_cache=tmp_path / "run") == library
    assert library.stat().st_ino == built


@pytest.mark.usefixtures("short_source")
def test_full_cache_is_no_fault_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is built elsewhere. Slower kernels would find the cache as full."""
    cache, compiler, allocate = cache_folder(), tmp_path / "c++", os.posix_fallocate
    real = shutil.which("c++")
    compiler.write_text(f'#!/bin/sh\ncase "$TMPDIR" in {cache}/*) exit 1; esac\nexec {real} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def fill_cache(file: int, start: int, length: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(cache):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, start, length)

    monkeypatch.setattr(os, "posix_fallocate", fill_cache)
    assert build_library("portable", spare_cache=tmp_path / "run").is_relative_to(tmp_path / "run")


@pytest.mark.usefixtures("short_source")
@pytest.mark.parametrize(
    "death", ["kill -9 $$", "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1"]
)
def test_killed_compiler_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str) -> None:
    """As it is for lack of memory. A slower level would need as much."""
    compiler, real, mark = tmp_path / "c++", shutil.which("c++"), tmp_path / "killed"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) mkdir {mark} 2>&- && {{ {death}; }};; esac\nexec {real} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert build_library("portable").exists()
    assert mark.exists()


@pytest.mark.usefixtures("short_source")
def test_nothing_is_compiled_where_no_place_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever the level: each takes half a minute to compile."""

    def fill(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def compile_(*_: object, **__: object) -> None:
        raise AssertionError("in vain")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    monkeypatch.setattr(compiling, "_run", compile_)
    monkeypatch.setattr(compiling, "available_levels", lambda: ["avx2", "portable"])
    with pytest.raises(NoPlace, match=r"No space left on device.*; .*No space left on device"):
        load_library(spare_cache=tmp_path / "run")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".lock"]


@pytest.mark.usefixtures("short_source")
def test_library_of_a_cache_that_cannot_be_written_is_used(tmp_path: Path) -> None:
    library = build_library("portable")
    library.parent.chmod(0o500)
    (tmp_path / "triptych").chmod(0o500)
    try:
        assert build_library("portable", spare_cache=tmp_path / "run") == library
    finally:
        (tmp_path / "triptych").chmod(0o700)
        library.parent.chmod(0o700)


@pytest.mark.usefixtures("unwritable_cache")
def test_library_is_loaded_from_where_no_code_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from /dev/shm in a container, where the run directory is."""
    library = build_library("portable", spare_cache=tmp_path / "run")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(libraries, "Kernels", lambda path: path != str(library) and ctypes.CDLL(path))
    loaded = libraries._open("portable", tmp_path / "run")
    assert loaded.whole() == 42


def test_every_processor_has_a_level() -> None:
    assert available_levels()[-1] in ("portable", "neon")


@pytest.mark.parametrize(
    ("features", "levels", "option"),
    [
        ("fp asimd evtstrm crc32 cpuid", ["neon"], "-march=armv8-a"),
        ("fp asimd atomics asimdrdm lrcpc asimddp", ["neon_dot", "neon"], "-march=armv8.2-a+dotprod"),
        (
            "fp asimd asimddp sve svei8mm i8mm bf16",
            ["neon_bf16", "neon_dot", "neon"],
            "-march=armv8.2-a+dotprod+bf16+i8mm",
        ),
    ],
    ids=["Cortex-A72", "Neoverse N1", "Neoverse V1"],
)
def test_levels_of_arm_processors(
    features: str, levels: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\nCPU implementer\t: 0x41\n\n")
    monkeypatch.setattr(compiling, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert available_levels() == levels
    assert option in compiling.compile_options(levels[0])
