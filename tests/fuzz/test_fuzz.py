"""A small part of the fuzzing with every test run; ``fuzz.py`` does the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.fuzz import MAX_GROWTH_KIB, MAX_INPUT_S, fuzz, peak_kib
from tests.fuzz.targets import make_targets

NAMES = ["public frames", "worker frames", "records", "journal", "config", "card", "facts", "keys"]
NUM_INPUTS = 2000


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes_are_refused_cleanly(name: str, tmp_path: Path) -> None:
    target, before = make_targets(tmp_path)[name], peak_kib()
    outcome = fuzz(target, name, seed=1, count=NUM_INPUTS)
    assert outcome.num_refused > NUM_INPUTS / 10
    assert outcome.slowest_ms < MAX_INPUT_S * 1e3
    assert peak_kib() - before < MAX_GROWTH_KIB


def test_every_decoder_is_fuzzed(tmp_path: Path) -> None:
    assert list(make_targets(tmp_path)) == NAMES
