"""`python -m pagewire`: the `pagewire` command."""

from pagewire.cli import main

main()
