"""Make docs/images/demo.svg from a real run of `covey train`."""

import io
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 104


def main() -> None:
    """Run the demo, and draw what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["covey", "train", "--run", "runs/arithmetic-grpo-1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print("[bold]$ covey train[/]")
    for line in done.stdout.splitlines():
        style = "green" if "greedy" in line and "held-out" in line else ""
        console.print(Text(line, style=style), soft_wrap=True)
    console.save_svg(str(HERE / "demo.svg"), title="covey: two CPU cores, no GPU")


if __name__ == "__main__":
    main()
