"""A pytest plugin: ``tests`` is the folder beside this one, even if some package installed one of that name.

Ours has no ``__init__.py``, and Python prefers a folder with one, wherever it is on its path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

tests = ModuleType("tests")
tests.__path__ = [str(Path(__file__).resolve().parents[2] / "tests")]
sys.modules["tests"] = tests
