"""Makes the pictures of TensorBoard in these pages: a screenshot of each tab.

    pip install -e ".[browser]"
    pointup train --steps 60 --eval-every 15 --output-dir runs/a
    pointup train --steps 60 --eval-every 15 --model.k 8 --output-dir runs/b
    python docs/tensorboard_pictures.py runs -o pictures/

tensorboard_charts.png and tensorboard_images.png are those of the page about training. Needs a
Chromium (CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image
from playwright.sync_api import Page, sync_playwright

TABS = {
    "charts": "#timeseries",
    "images": "#images",
    "hparams": "#hparams",
}
SECONDS_TO_LOAD = 25
ARGUMENTS = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]


def screenshots(page: Page, address: str, folder: Path) -> None:
    """A picture of each tab, with few colours, so that it is small."""
    for name, tab in TABS.items():
        page.goto("about:blank")
        page.goto(f"{address}/{tab}")
        page.wait_for_timeout(1000 * SECONDS_TO_LOAD)
        path = folder / f"tensorboard_{name}.png"
        page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of run directories")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the pictures")
    options = parser.parse_args(args)
    options.output.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    # The page shows the folder as it is given.
    runs = options.runs.resolve()
    words = ["--logdir", runs.name, "--port", str(port), "--load_fast", "false"]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *words],
        cwd=runs.parent,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(120):
            try:
                urlopen(address).close()
                break
            except URLError:
                time.sleep(1)
        # The events are read in the background.
        time.sleep(SECONDS_TO_LOAD)
        with sync_playwright() as running:
            chromium = os.environ.get("POINTUP_CHROMIUM") or shutil.which("chromium")
            arguments = ARGUMENTS + ["--no-sandbox"] * (os.geteuid() == 0)
            browser = running.chromium.launch(executable_path=chromium, args=arguments)
            page = browser.new_page(viewport={"width": 1500, "height": 940})
            screenshots(page, address, options.output)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
