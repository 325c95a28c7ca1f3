"""The command line: one file a command, joined in `app`."""
