"""The kernels as a shared library, compiled once per machine, compiler and version of the sources.

There is no build step at install time and no dependency on torch's headers: a system compiler is enough, and with the
library in the cache, starting costs one hash of the sources.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ....protocol.errors import ConfigError
from ....protocol.lifeline import child_environment
from ..user_cache import keep_newest, making, note_use, places
from .tile_registers import are_permitted

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
_CPUINFO = Path("/proc/cpuinfo")

_SPACE_BYTES = 64 << 20  # the compiler's temporary files, and the library, take less
_LEAST_BYTES = 4 << 20  # with less, half a minute of compiling would be in vain
_BY_SIGNAL = 128  # exit codes above it
_KILLED = ("signal terminated program", "unable to execute command: ")  # how GCC and Clang report it of their parts
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread",
    # The same bits from every instantiation of a template: products are fused only where the source says so.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi", "-Wno-ignored-attributes",
]  # fmt: skip
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma")
_TILES = "amx_tile"

# Fastest first: the processor features that each level needs, as named in /proc/cpuinfo.
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", _TILES, "amx_bf16", "amx_int8"),  # Sapphire Rapids and later
    "avx512": (*_AVX512, "avx512_bf16"),
    "avx512_vnni": _AVX512,  # Cascade Lake, Ice Lake
    "avx2": ("avx2", "fma"),
    "neon_bf16": ("asimd", "asimddp", "bf16", "i8mm"),  # Graviton 3, Grace, Axion, Cobalt, Apple M2
    "neon_dot": ("asimd", "asimddp"),  # Graviton 2, Ampere Altra, Raspberry Pi 5, Apple M1
    "neon": ("asimd",),  # every 64-bit Arm processor
    "portable": (),
}

# Features that a level uses if the processor has them and the compiler knows them.
_WELCOME = {
    "amx": ("avx512vbmi",),
    "avx512": ("avx512vbmi", "avx512_vp2intersect"),  # the latter tells Zen 5, see src/tile.h
    "avx512_vnni": ("avx512vbmi",),
    "avx2": ("avx_vnni",),
}

# The features above, as extensions of the architecture.
_ARM_EXTENSIONS = {"asimd": "", "asimddp": "+dotprod", "bf16": "+bf16", "i8mm": "+i8mm"}
# Before registers are allocated, GCC would move the loads of a tile to its front, and spill sums.
_ARM_FLAGS = ["-fno-schedule-insns"]

_NUM_KEPT = 16  # libraries in the cache: of several versions and levels
_LONGEST = "int8.cpp"  # to compile: two fifths of all


class NoCompiler(Exception):
    """The kernels cannot be built here; the message says why."""


class CompilerKilled(NoCompiler):
    """Something ended the compiler, such as the kernel for lack of memory."""


class NoPlace(NoCompiler):
    """The library cannot be written anywhere, whichever it is."""


def available_levels() -> list[str]:
    """The levels this process can run, fastest first."""
    flags = _processor_flags()
    if _TILES in flags and not are_permitted():
        flags.remove(_TILES)
    levels = [level for level, needed in LEVELS.items() if flags.issuperset(needed)]
    if "neon" in levels:
        levels.remove("portable")  # the same, as the sources always use NEON on Arm
    return levels


def levels_to_try(wanted: str) -> list[str]:
    """The levels to try in turn, fastest first: for "auto" all that this machine can run, otherwise the wanted one.

    Raises:
        ConfigError: it is not available.
    """
    levels = available_levels()
    if wanted == "auto":
        return levels
    if wanted not in levels:
        raise ConfigError(f"kernels is {wanted!r}, this machine can run: auto, {', '.join(levels)}", param="kernels")
    return [wanted]


def library_name(level: str) -> str:
    """The file name of that level's library, which depends on the sources, flags, compiler and architecture.

    Raises:
        NoCompiler: there is no C++ compiler.
    """
    compiler = _compiler()
    # The identity uses the resolved path, as the same compiler may be found by another one. It is run by the path
    # found, because its behaviour depends on the name it is called by.
    options = [*_FLAGS, *_options(_features(level))]
    identity = [os.path.realpath(compiler), *options, _version(compiler), platform.machine()]
    digest = hashlib.sha256("\0".join(identity).encode())
    for _, source in sorted(read_sources(SOURCES).items()):
        digest.update(source)
    return f"{level}-{digest.hexdigest()[:16]}.so"


@cache
def read_sources(folder: Path) -> dict[str, bytes]:
    """The content of each source by its name, when this is first called: a process that is forked after an upgrade goes
    on with those of its own version.
    """
    return {source.name: source.read_bytes() for source in folder.iterdir()}


def build_library(level: str, *, spare_cache: Path | None = None) -> Path:
    """The shared library of that level, from the cache or newly compiled; ``spare_cache`` is where it goes if the cache
    cannot take it.

    Raises:
        NoCompiler: there is no C++ compiler, or it fails.
        NoPlace: the library cannot be written anywhere.
    """
    name = library_name(level)
    libraries = [library for folder in places("kernels", spare_cache) if not _is_foreign(library := folder / name)]
    for library in libraries:
        if os.path.exists(library):  # a Path's own method raises if the folder may not be read
            note_use(library)
            return library
    reasons = []
    for library in libraries:
        try:
            return _build(level, library)
        except OSError as error:
            reasons.append(str(error))
            logger.warning("cannot write the kernels to the cache: %s", error)
    raise NoPlace(f"cannot write the kernels: {'; '.join(reasons) or 'there is no folder of this user for them'}")


def _is_foreign(library: Path) -> bool:
    """Whether another user, who could make it do anything, has put the library there and it cannot be deleted. Deletes
    it if possible.
    """
    try:
        owner = library.stat().st_uid
    except OSError:  # there is none, or none that can be read
        return False
    if owner in (0, os.geteuid()):
        return False
    logger.warning("the kernels are compiled again, as another user owns %s", library)
    try:
        library.unlink()
    except OSError:
        return True
    return False


def _build(level: str, library: Path) -> Path:
    with making(library) as scratch:
        if scratch is not None:
            _compile([_compiler(), *compile_options(level)], library, scratch)
    return library


def _compile(command: list[str], library: Path, scratch: Path) -> None:
    _check_space(scratch, _LEAST_BYTES)
    logger.info("compiling the kernels with %s, once: that takes about half a minute", command[0])
    start = time.monotonic()
    output = scratch / library.name
    for name, content in read_sources(SOURCES).items():
        (scratch / name).write_bytes(content)
    sources = {source: source.with_suffix(".o") for source in scratch.glob("*.cpp")}
    # In the order of the file system, it could be the last to begin, with nothing left for the other processors.
    in_order = sorted(sources, key=lambda source: source.name != _LONGEST)

    def compile_one(source: Path) -> None:
        _run([*command, "-c", source, "-o", sources[source]], scratch=scratch)

    def was_killed(source: Path) -> bool:
        try:
            compile_one(source)
        except CompilerKilled as error:
            logger.warning("%s: compiling it again, alone: %s", source.name, error)
            return True
        return False

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as beside:
        killed = list(beside.map(was_killed, in_order))
    for source in itertools.compress(in_order, killed):  # another level would take as much memory, and be slower
        compile_one(source)
    _run([*command, "-shared", *sources.values(), "-o", output], scratch=scratch)
    with output.open("rb") as file:
        os.fsync(file.fileno())  # after a power loss, each process that loads a part of it would die
    os.replace(output, library)  # atomically
    keep_newest(library.parent, "*.so", _NUM_KEPT)
    logger.info("compiled the %s in %.1f s", library.name, time.monotonic() - start)


def _run(command: list[str | Path], *, scratch: Path) -> None:
    """Compile something. The compiler keeps its temporary files in ``scratch``, as it may be killed."""
    apart = [sys.executable, "-m", f"{__package__}.compiler_process", str(os.getpid()), *command]
    environment = {**child_environment(computes=True), "TMPDIR": str(scratch), "LC_ALL": "C"}
    done = subprocess.run(
        apart, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        _check_space(scratch, _SPACE_BYTES)  # a compiler that fails may have failed for that
        is_killed = done.returncode > _BY_SIGNAL or any(words in done.stderr for words in _KILLED)
        kind = CompilerKilled if is_killed else NoCompiler
        raise kind(f"{command[0]} fails with {done.returncode}: {done.stderr[-2000:]}")


def _check_space(scratch: Path, num_bytes: int) -> None:
    """
    Raises:
        OSError: there is less.
    """
    with tempfile.TemporaryFile(dir=scratch) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)


def _compiler() -> str:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler: none of {', '.join(_COMPILERS)} is installed")
    return compiler


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def compile_options(level: str) -> list[str]:
    """The options for the compiler.

    Raises:
        NoCompiler: there is no C++ compiler.
    """
    known = [
        feature for feature in _features(level) if feature in LEVELS[level] or _knows(_compiler(), *_options([feature]))
    ]
    return [*_FLAGS, *_options(known)]


def _features(level: str) -> list[str]:
    """The processor features for a library of this level. Whether the compiler knows the optional ones is asked only
    when the library is built.
    """
    return [*LEVELS[level], *(feature for feature in _WELCOME.get(level, ()) if feature in _processor_flags())]


def _options(features: list[str]) -> list[str]:
    if "asimd" in features:
        extensions = "".join(_ARM_EXTENSIONS[feature] for feature in features)
        return [f"-march=armv8.2-a{extensions}" if extensions else "-march=armv8-a", *_ARM_FLAGS]
    return [
        "-m" + feature.replace("avx512_", "avx512").replace("avx_", "avx").replace("amx_", "amx-")
        for feature in features
    ]


@cache
def _knows(compiler: str, *options: str) -> bool:
    command = [compiler, *options, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _processor_flags() -> set[str]:
    name = {"x86_64": "flags", "aarch64": "Features"}.get(platform.machine())
    if name is None or not _CPUINFO.exists():
        return set()
    for line in _CPUINFO.read_text().splitlines():
        if line.startswith(name):
            return set(line.partition(":")[2].split())
    return set()
