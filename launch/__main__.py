"""The program ``triptych``. Ctrl-C during its imports ends it quietly, just as it does later."""

from __future__ import annotations

from typing import NoReturn

from .signals import interrupts_end_process


def main() -> NoReturn:
    """Run the verb of this command line and exit."""
    with interrupts_end_process():
        from .cli import main as run
    run()


if __name__ == "__main__":
    main()
