"""The program ``triptych``. Ctrl-C during its imports ends it quietly, just as it does later."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from .signals import INTERRUPTED, handle_unless_ignored


def main() -> NoReturn:
    """Run the verb of this command line and exit."""
    # No exception here: raised in the middle of an import, it may surface as something else.
    handle_unless_ignored(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from .cli import main as run

    handle_unless_ignored(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
