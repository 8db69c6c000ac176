"""The command line: one file a command group, imported only when it is used."""
