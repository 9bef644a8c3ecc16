"""A part of the kernels, as all of them would take half a minute to compile: what computes in bfloat16."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from triptych.workers.execute.kernels import compile as compiling
from triptych.workers.execute.kernels import library as libraries
from triptych.workers.execute.kernels.compile import SOURCES
from triptych.workers.execute.kernels.library import Kernels

_PARTS = [SOURCES / name for name in ("library.cpp", "bfloat16.cpp")]
_PLACEHOLDERS = Path(__file__).with_name("partial_absent.cpp")
PRODUCTS_OF_BYTES = Path(__file__).with_name("partial_products.cpp")  # to be added

# Passes that only make code faster, without which the compiler is too.
_SLOW_PASSES = (
    "tree-pta", "tree-dominator-opts", "tree-dse", "tree-sink", "tree-loop-optimize", "if-conversion", "if-conversion2",
    "move-loop-invariants", "ipa-profile", "ipa-modref",
)  # fmt: skip
_QUICKLY = ["-O1", *(f"-fno-{name}" for name in _SLOW_PASSES)]


def load_partial(level: str, *more: Path) -> Kernels:
    """Whatever this processor can run. ``more`` are further sources."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for source in (*SOURCES.glob("*.h"), *_PARTS, _PLACEHOLDERS, *more):
            shutil.copy(source, folder)
        patch.setattr(compiling, "SOURCES", Path(folder))
        compile_quickly(patch)
        return libraries._prepared(libraries._open(level), level)


def compile_quickly(patch: pytest.MonkeyPatch) -> None:
    """The code is right and slow, and takes half the time to compile."""
    patch.setattr(compiling, "_FLAGS", [*(flag for flag in compiling._FLAGS if flag != "-O3"), *_QUICKLY])
