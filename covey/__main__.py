"""The `covey` command and `python -m covey`."""

from __future__ import annotations

import sys

from covey.supported import problem


def main() -> None:
    """Run Covey's command-line interface; on a system that is not supported, say so and end."""
    if why := problem():
        print(f"covey: {why}", file=sys.stderr)
        sys.exit(1)
    from covey.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
