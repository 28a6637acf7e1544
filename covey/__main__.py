"""`python -m covey` runs the command line."""

from covey.cli.main import main

main()
