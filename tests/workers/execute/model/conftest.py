"""Models of tests leave nothing in the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from triptych.workers.execute.model.guard import proof


@pytest.fixture(scope="module", autouse=True)
def own_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hundreds of models are proven here, and the cache keeps the last 64 proofs: those of models that pipelines of
    other tests serve would be lost, and each of their starts would take three times as long.
    """
    folder = tmp_path_factory.getbasetemp() / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "places", lambda name, spare: [folder / name])
        yield
