"""``python -m triptych`` is the command line."""

from .launch.__main__ import main

if __name__ == "__main__":
    main()
