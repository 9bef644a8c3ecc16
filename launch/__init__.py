"""What a person starts: the command line, the demo, and the model that ships with the package."""
