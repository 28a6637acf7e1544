"""Make the pictures of docs/ui.md from real runs: ui.py FOLDER. Needs chromium."""

import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from covey.lab.ui.server import Server  # noqa: E402
from covey.lab.ui.views import Site  # noqa: E402
from tests.lab.ui.browser import Browser  # noqa: E402

SIZES = ((1280, 860), (390, 844))
READY = {
    "curves": "document.querySelectorAll('.panel').length > 5",
    "groups": "document.querySelectorAll('.rollout').length > 1",
    "tokens": "document.querySelectorAll('.token').length > 5",
    "health": "document.querySelector('.health') && !document.body.innerText.includes('checking')",
    "explorer": "document.querySelectorAll('.step-token').length > 5",
}


def main(folder: Path) -> None:
    """Take a picture of each view, light and dark, wide and narrow."""
    site = Site([folder])
    server = Server("127.0.0.1", 0, site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    runs = [name for name, place in site.places().items() if place.kind == "run"]
    page = Browser()
    try:
        for width, height in SIZES:
            page.resize(width, height)
            for dark in (False, True):
                page.dark(dark)
                for view in READY:
                    show(page, server.url, runs, view)
                    name = f"ui-{view}-{'dark' if dark else 'light'}-{width}.png"
                    page.picture(HERE / name)
    finally:
        page.close()
        server.stop()


def show(page: Browser, url: str, runs: list[str], view: str) -> None:
    """Open a view and wait until it is drawn."""
    shown = "&".join(f"run={run}" for run in (runs if view in ("curves", "health") else runs[:1]))
    where = "groups" if view == "tokens" else view
    page.open(f"{url}#view={where}&{shown}{'&smooth=0.6' if view == 'curves' else ''}")
    if where == "groups":
        page.wait("document.querySelectorAll('.group').length > 1")
        page.click(".group")
        page.wait(READY["groups"])
    if view == "tokens":
        page.run("location.hash += '&by=sampler_logp'")
        page.click(".rollout button", "Tokens")
    page.wait(READY[view], 120)
    time.sleep(0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
