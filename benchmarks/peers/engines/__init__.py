"""An adapter per engine, for child.py: ``offline`` runs all requests at once, ``online`` each at its arrival."""
