"""Imported objects are excluded from garbage collection, during and after an import."""

from __future__ import annotations

import gc
import subprocess
import sys

from triptych.workers.importing import importing

PROBE = """
import gc, sys
from triptych.workers.importing import importing
with importing("fractions"):
    was_enabled = gc.isenabled()
    import fractions
print(was_enabled, gc.isenabled(), gc.get_freeze_count() > 1000)
"""


def test_no_collection_runs_during_an_import() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_repeated_import_changes_nothing() -> None:
    before = gc.get_freeze_count()
    with importing("sys"):
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # less if something frozen was freed meanwhile
