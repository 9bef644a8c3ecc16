"""A plugin of pytest: ``tests`` is the folder beside this one, even where some package installed one of that name.

Ours has no ``__init__.py``, and Python prefers a folder that has one wherever on its path it lies.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

tests = ModuleType("tests")
tests.__path__ = [str(Path(__file__).resolve().parents[2] / "tests")]
sys.modules["tests"] = tests
