"""The command line: one module a command; parse, build, call."""
