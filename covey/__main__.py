"""`python -m covey` is `covey`."""

from covey.cli.main import main

main()
