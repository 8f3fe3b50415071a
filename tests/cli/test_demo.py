"""`pointup demo`: an uploaded file is upsampled, and shown in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from browser import open_browser

from pointup.cli import demo
from pointup.cli.demo import demo_app, upsample_upload
from pointup.cli.main import main
from pointup.errors import ConfigError
from pointup.io.files import read_points


def write_scan(path: Path) -> Path:
    x, y = np.random.default_rng(0).random((2, 600)) * 4
    np.savetxt(path, np.column_stack([x, y, np.sin(2 * x)]))
    return path


def test_without_gradio_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo"]) == 1
    assert "pip install 'pointup[demo]'" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_refused_before_the_page_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str | None] = []

    def serve(folder: Path, model: str | None, max_megabytes: int) -> None:
        served.append(model)
        raise ConfigError("served")

    monkeypatch.setattr(demo, "demo_app", serve)
    for model, message in (
        ("shaps", "did you mean shapes"),
        (str(tmp_path), "neither an included model"),
    ):
        assert main(["demo", "--model", model]) == 1
        assert message in capsys.readouterr().err
    assert served == []
    assert main(["demo", "--model", "shapes"]) == 1
    assert served == ["shapes"]


@pytest.mark.slow
def test_an_upload_is_upsampled_and_an_error_is_that_of_the_command(tmp_path: Path) -> None:
    scan = write_scan(tmp_path / "scan.xyz")
    target, key, text = upsample_upload(scan, "shapes", 2, tmp_path / "out")
    assert target.name == "scan_dense.xyz" and len(read_points(target)) == 1200
    assert (tmp_path / "out" / key / "view.html").is_file()
    assert str(tmp_path) not in text and "1,200" in text
    scan.write_text("no points\n")
    with pytest.raises(ValueError, match=r"^scan\.xyz: "):
        upsample_upload(scan, None, 2, tmp_path / "out")


@pytest.mark.slow
def test_the_page_shows_the_viewer_of_an_uploaded_file(tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="no Gradio: pip install 'pointup[demo]'")
    import uvicorn

    scan = write_scan(tmp_path / "scan.xyz")
    app = demo_app(tmp_path / "out")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = Thread(target=server.run, daemon=True)
    with open_browser() as browser:
        thread.start()
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{port}/")
        page.set_input_files("input[type=file]", scan)
        page.get_by_text("scan.xyz").first.wait_for()
        page.get_by_role("button", name="Upsample").click()
        frame = page.frame_locator("iframe.viewer")
        frame.locator("body[data-ready]").wait_for(timeout=120_000)
        assert "2,400" in page.get_by_label("Report").input_value()
        assert page.request.get(f"http://127.0.0.1:{port}/view/{'0' * 32}").status == 404
        assert page.request.get(f"http://127.0.0.1:{port}/view/..%2F..%2Fetc").status == 404
        page.wait_for_timeout(1500)
        page.screenshot(path=tmp_path / "page.png")
        # Nothing comes from elsewhere.
        elsewhere = [url for url in asked if url.startswith("http") and "127.0.0.1" not in url]
        assert not elsewhere
    server.should_exit = True
    thread.join(timeout=20)
