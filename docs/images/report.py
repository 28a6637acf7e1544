"""Make docs/images/report.png from the report of a real comparison: report.py FOLDER.

Needs chromium, and plotly from covey[report].
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1280, 1420


def main(folder: Path) -> None:
    """Write the report anew, and take a picture of how it begins."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("this needs chromium or google-chrome")
    subprocess.run([sys.executable, "-m", "covey", "compare", "--report", str(folder)], check=True)
    picture(browser, folder / "report.html", HERE / "report.png")


def picture(
    browser: str, page: Path, target: Path, *, size: tuple[int, int] = (WIDTH, HEIGHT)
) -> None:
    """Take a picture of a page, once its charts are drawn."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=10000",
            f"--screenshot={target.resolve()}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
