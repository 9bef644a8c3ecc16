"""An adapter for each engine, for child.py: ``offline`` runs requests at once, ``online`` each at its arrival."""
