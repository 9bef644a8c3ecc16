"""A folder with an ``__init__.py`` is a package to pytest: what fixtures of that scope share ends with the folder."""
