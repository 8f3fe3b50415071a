"""A Chromium for tests of pages, driven by Playwright; tests are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# WebGL on the processor, so that tests need no graphics card and pixels are the same anywhere.
ARGUMENTS = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]


@contextmanager
def open_browser() -> Iterator[Any]:
    """A Playwright browser. Skips the test, saying why, where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: pip install playwright"
    )
    path = os.environ.get("POINTUP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as running:
        path = path or running.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium: install one, or `playwright install chromium`")
        # Chromium refuses its sandbox to root, as which containers run.
        arguments = ARGUMENTS + ["--no-sandbox"] * (os.geteuid() == 0)
        browser = running.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class OpenPage:
    """A page of the viewer; `complaints` are the errors and warnings of its console."""

    def __init__(self, browser: Any, path: Path, size: tuple[int, int] = (900, 560), **more: Any):
        self.complaints: list[str] = []
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, offline=True, **more
        )
        self.page = context.new_page()
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        self.settle()

    def _listen(self, message: Any) -> None:
        # Chromium reports reads of pixels as a matter of speed; only tests read them.
        if message.type in ("error", "warning") and "GPU stall" not in message.text:
            self.complaints.append(message.text)

    def settle(self) -> None:
        """Wait until nothing is drawn any more."""
        self.page.wait_for_function(
            "() => !viewer.stage.requested && viewer.stage.fits && "
            "performance.now() - viewer.stage.lastMove > 250",
            timeout=60_000,
        )

    def do(self, script: str) -> Any:
        result = self.page.evaluate(script)
        self.page.wait_for_timeout(50)
        self.settle()
        return result

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.page.wait_for_timeout(50)
        self.settle()

    def pixels(self) -> np.ndarray:
        """The drawn points (height, width, 3), without captions and controls."""
        data = self.page.evaluate(
            "() => { viewer.stage.draw(6e6); return viewer.stage.canvas.toDataURL().slice(22) }"
        )
        return np.asarray(Image.open(BytesIO(b64decode(data))).convert("RGB")).astype(int)

    def colored(self) -> int:
        """Number of pixels that a point covers, which has more colour than the background."""
        return int((np.ptp(self.pixels(), axis=2) > 40).sum())
