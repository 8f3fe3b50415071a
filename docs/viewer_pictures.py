"""Makes the pictures of the viewer and of a report in these pages, and measures the viewer.

Needs Playwright and a Chromium (CONTRIBUTING.md). Run it in the folder of the pages:

    python docs/viewer_pictures.py picture view.html docs/viewer_forest.png SCRIPT ...
    python docs/viewer_pictures.py measure 100000 1000000 2000000 5000000
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from pointup.visualization.viewer import Channel, Layer, Scene, write_viewer

ARGUMENTS = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]
LARGEST_FILE = 300_000


def picture(page: Page, source: str, target: str, *scripts: str) -> None:
    """A screenshot of a page after some scripts, of at most 300 kB; the upper part of a report."""
    page.goto(Path(source).resolve().as_uri())
    is_report = page.locator("iframe").count() > 0
    if is_report:
        page.frame_locator("iframe").locator("body[data-ready]").wait_for(timeout=120_000)
    else:
        page.wait_for_selector("body[data-ready]", timeout=120_000)
    for script in scripts:
        page.evaluate(script)
        page.wait_for_timeout(3000)
    page.wait_for_timeout(4000)
    page.screenshot(path=target, full_page=is_report)
    image = Image.open(target).convert("RGB")
    if is_report:
        image = image.crop((0, 0, image.width, 2000)).resize((952, 1400))
    for number in (256, 128, 64):
        image.quantize(number).save(target, optimize=True)
        if Path(target).stat().st_size <= LARGEST_FILE:
            break
    print(f"{target}: {Path(target).stat().st_size / 1000:.0f} kB")


def measure(page: Page, *numbers: str) -> None:
    """Size, time to write and to open, and frames per second of a hilly landscape with trees."""
    for number in map(int, numbers):
        rng = np.random.default_rng(0)
        x, y = rng.random((2, number)) * 1000
        tree = rng.exponential(4, number) * (rng.random(number) < 0.4)
        points = np.column_stack([x, y, 20 * np.sin(x / 60) * np.cos(y / 80) + tree])
        channels = {
            "class": Channel(rng.integers(1, 6, number), "category", "class"),
            "intensity": Channel(rng.random(number), label="intensity", colormap="gray"),
        }
        path = Path(tempfile.mkdtemp()) / "page.html"
        began = time.monotonic()
        size = write_viewer(path, [Scene("landscape", [Layer("landscape", points, channels)])])
        writing = time.monotonic() - began
        began = time.monotonic()
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]", timeout=120_000)
        opening = time.monotonic() - began
        page.wait_for_timeout(4000)
        at_rest = page.inner_text("#status")
        page.evaluate("viewer.change({turning: true})")
        page.wait_for_timeout(12_000)
        print(
            f"{number:,}: {size / 1e6:.1f} MB, written in {writing:.1f} s, "
            f"open in {opening:.1f} s; "
            f"at rest {at_rest}; turning {page.inner_text('#status')}",
            flush=True,
        )
        shutil.rmtree(path.parent)


def main() -> None:
    with sync_playwright() as running:
        path = os.environ.get("POINTUP_CHROMIUM") or shutil.which("chromium")
        arguments = ARGUMENTS + ["--no-sandbox"] * (os.geteuid() == 0)
        browser = running.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page(viewport={"width": 1360, "height": 800})
        {"picture": picture, "measure": measure}[sys.argv[1]](page, *sys.argv[2:])
        browser.close()


if __name__ == "__main__":
    main()
