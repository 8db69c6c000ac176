"""The command line: one file a command group, imported only when it is used."""

import sys

from hybridsched.notice import listen_as

# Before any command's modules are imported.
listen_as(sys.argv[1:])
