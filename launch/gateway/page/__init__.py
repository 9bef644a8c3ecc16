"""The live page at ``/``: the three panels, the requests in them, the page pool and the last steps. Read-only."""
