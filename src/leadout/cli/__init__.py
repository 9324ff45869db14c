"""The command line: thin commands, their flags from settings models, and exit codes."""
