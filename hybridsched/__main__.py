"""`python -m hybridsched`: the same as the `hybridsched` command."""

from hybridsched.cli.main import main

main()
