"""The kernels of other levels than the fastest, compiled quickly, or only what computes in bfloat16 of them.

The code is right and slow, and takes a third of the processor time to compile.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels import library as libraries
from triptych.workers.execute.kernels.compile import SOURCES
from triptych.workers.execute.kernels.library import Kernels

_PARTS = [SOURCES / "library.cpp", SOURCES / "bfloat16.cpp", Path(__file__).with_name("partial_pages.cpp")]
_PLACEHOLDERS = Path(__file__).with_name("partial_absent.cpp")
PRODUCTS_OF_BYTES = Path(__file__).with_name("partial_products.cpp")  # to be added

# Passes that only make code faster, without which the compiler is too.
_SLOW_PASSES = (
    "tree-pta", "tree-dominator-opts", "tree-dse", "tree-sink", "tree-loop-optimize", "if-conversion", "if-conversion2",
    "move-loop-invariants", "ipa-profile", "ipa-modref",
)  # fmt: skip
QUICKLY = ["-O1", *(f"-fno-{name}" for name in _SLOW_PASSES)]


def load_whole(level: str) -> Kernels:
    return _load(level, sorted(SOURCES.glob("*.cpp")))


def load_partial(level: str, *more: Path, beside: Iterable[Path] = ()) -> Kernels:
    """Whatever this processor can run. ``more`` are further sources, as are those of ``beside``, which are not compiled
    together with the others.
    """
    return _load(level, [*_PARTS, *more], beside=[_PLACEHOLDERS, *beside])


def _load(level: str, sources: Iterable[Path], *, beside: Iterable[Path] = ()) -> Kernels:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for source in (*SOURCES.glob("*.h"), *beside):
            shutil.copy(source, folder)
        for source in sources:
            shutil.copy(source, Path(folder, f"{source.stem}.inc"))
        # As one unit: what all of them include is read once, and what they use of it compiled once.
        Path(folder, "together.cpp").write_text("".join(f'#include "{source.stem}.inc"\n' for source in sources))
        patch.setattr(compiling, "SOURCES", Path(folder))
        patch.setattr(compiling, "_FLAGS", [*(flag for flag in compiling._FLAGS if flag != "-O3"), *QUICKLY])
        return libraries._prepared(libraries._open(level), level)
