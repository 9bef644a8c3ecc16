"""How the demo model was made and is measured; not part of an installed package."""
