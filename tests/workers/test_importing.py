"""What is imported is not looked at for garbage, while it comes and when it is there."""

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


def test_nothing_is_collected_until_a_library_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_a_library_that_is_there_changes_nothing() -> None:
    before = gc.get_freeze_count()
    with importing("sys"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
