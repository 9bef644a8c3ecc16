"""The verbs of the command line, and what several of them share."""
