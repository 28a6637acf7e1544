"""`python -m covey` runs Covey's command-line interface."""

from covey.cli.main import main

main()
