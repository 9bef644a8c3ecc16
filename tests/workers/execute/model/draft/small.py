"""Smaller steps of draft models on a GPU, importable by processes that import little."""

from __future__ import annotations

import pytest

from triptych.workers.execute.model.draft import build, model


def shrink_draft_steps(patch: pytest.MonkeyPatch) -> None:
    """Warm-up and graphs interpret fewer tokens."""
    patch.setattr(model, "FEW", 4)
    patch.setattr(build, "ON_GPU", build.ON_GPU._replace(max_rows=2, max_behind=8))
