"""Flags of the command line, their environment variables and the config file."""
