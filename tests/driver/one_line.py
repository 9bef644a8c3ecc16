"""``python -m tests.driver.one_line CODE``."""

import os  # noqa: F401
import signal  # noqa: F401
import sys

if __name__ == "__main__":
    exec(sys.argv[1])
