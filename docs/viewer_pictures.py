"""Makes the pictures of the viewer and of a report, and measures the viewer.

Needs Playwright and a Chromium (CONTRIBUTING.md):

    python docs/viewer_pictures.py draw --surveys FOLDER --meshes FOLDER [--runs RUN RUN]
    python docs/viewer_pictures.py measure 100000 1000000 2000000 5000000

FOLDER has transect_als.laz, transect_drone.laz and autzen_trim.las, or meshes; docs/results.md says
where they come from. RUN is the output directory of a training run, for report.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from pointup.cli.main import main as pointup
from pointup.visualization.viewer.document import write_viewer
from pointup.visualization.viewer.scenes import Channel, Layer, Scene

DOCS = Path(__file__).parent
ARGUMENTS = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]
LARGEST_FILE = 300_000
SECOND_SAMPLE = """() => {
    const samples = document.getElementById("scene");
    samples.value = "1";
    samples.dispatchEvent(new Event("change"));
}"""


def draw(page: Page, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.surveys:
            draw_surveys(page, options.surveys, work)
        if options.meshes:
            view = work / "shapes.html"
            noisy = ["--noise", 0.01, "--denoise", "--model", "noisy", "--view", view]
            run("evaluate", "shapes", "--meshes", options.meshes, *noisy)
            picture(page, view, "viewer_shape.png", SECOND_SAMPLE)
        if options.runs:
            run("report", *options.runs, "-o", work / "report.html")
            page.goto((work / "report.html").as_uri())
            page.frame_locator("iframe").locator("body[data-ready]").wait_for(timeout=120_000)
            save(page, "report.png", height=2000)


def draw_surveys(page: Page, surveys: Path, work: Path) -> None:
    """A forest from an aeroplane, upsampled to the density of a drone survey; an aerial survey."""
    airborne, drone = surveys / "transect_als.laz", surveys / "transect_drone.laz"
    dense, view = work / "dense.laz", work / "view.html"
    run("upsample", airborne, "-o", dense, "--model", "forest", "--ratio", 2.02)
    names = ["--names", "airborne", "forest, 2x", "--title", "Forest transect"]
    run("view", airborne, dense, *names, "--reference", drone, "-o", view)
    picture(page, view, "viewer_forest.png", "viewer.change({color: 'height'})")
    run("view", surveys / "autzen_trim.las", "-o", view)
    picture(page, view, "viewer_autzen.png", "viewer.change({color: 'rgb'})")


def run(*words: object) -> None:
    """Run a command of pointup; end with its status if it fails."""
    if status := pointup([str(word) for word in words]):
        raise SystemExit(status)


def picture(page: Page, view: Path, name: str, *scripts: str) -> None:
    """A screenshot of a page of the viewer after some scripts."""
    page.goto(view.resolve().as_uri())
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    for script in scripts:
        page.evaluate(script)
        page.wait_for_timeout(3000)
    save(page, name)


def save(page: Page, name: str, height: int | None = None) -> None:
    """A screenshot in docs/ of at most 300 kB, of the upper part of the page up to `height`."""
    path = DOCS / name
    page.wait_for_timeout(4000)
    page.screenshot(path=path, full_page=height is not None)
    image = Image.open(path).convert("RGB")
    if height:
        image = image.crop((0, 0, image.width, height)).resize((952, 1400))
    for number in (256, 128, 64):
        image.quantize(number).save(path, optimize=True)
        if path.stat().st_size <= LARGEST_FILE:
            break
    print(f"{name}: {path.stat().st_size / 1000:.0f} kB")


def measure(page: Page, options: argparse.Namespace) -> None:
    """Size, time to write and to open, and frames per second of a hilly landscape with trees."""
    for number in options.numbers:
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


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--surveys", type=Path, help="folder of surveys")
    drawing.add_argument("--meshes", type=Path, help="folder of meshes")
    drawing.add_argument("--runs", type=Path, nargs="+", help="runs to report on")
    drawing.set_defaults(act=draw)
    measuring = commands.add_parser("measure")
    measuring.add_argument("numbers", type=int, nargs="+", help="numbers of points")
    measuring.set_defaults(act=measure)
    options = parser.parse_args(args)
    with sync_playwright() as running:
        path = os.environ.get("POINTUP_CHROMIUM") or shutil.which("chromium")
        arguments = ARGUMENTS + ["--no-sandbox"] * (os.geteuid() == 0)
        browser = running.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page(viewport={"width": 1360, "height": 800})
        options.act(page, options)
        browser.close()


if __name__ == "__main__":
    main()
