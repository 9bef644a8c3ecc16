"""A shorter self-test for decoders on Triton's interpreter, importable by processes that import little."""

from __future__ import annotations

import pytest

from tests.conftest import HAS_GPU
from triptych.workers.execute.model.guard import probe


def shorten_self_test(patch: pytest.MonkeyPatch) -> None:
    """Use fewer tokens in the fused decoder's self-test where Triton is interpreted: it is most of a start there.

    There are still two ragged steps, and a chunk that ends on its own page.
    """
    if not HAS_GPU:
        patch.setattr(probe, "_CHUNKS", ((4, 1), (1, 3), (15, 3)))
