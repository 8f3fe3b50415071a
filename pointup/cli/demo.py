"""`pointup demo`: a page in the browser that upsamples an uploaded file and shows the viewer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from gradio import Blocks

BY_FORMAT = "by the format of the file"
LONGEST = 1800
"""Seconds that one file may take."""
WORDS = """# pointup

Adds points between the measured ones of a survey or a scan. The measured points stay as they are.
New points are estimates."""
Named = Annotated[str | None, tyro.conf.arg(metavar="DIR|HUB_ID", help_behavior_hint="(optional)")]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Serve a page that upsamples uploaded files and shows them before and after in the viewer.

    Needs the extra `demo` (Gradio). The page is for this machine; with --host 0.0.0.0, for all
    machines that reach it, without a password.
    """

    model: Named = None
    """One more model to choose: a directory or a Hub repository."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 7860
    """Port to listen on."""
    max_megabytes: int = 200
    """Largest file that is taken."""

    def run(self) -> int:
        from tempfile import TemporaryDirectory

        if self.max_megabytes < 1 or not 0 < self.port < 65536:
            raise ConfigError("--max-megabytes must be at least 1, --port within 1 to 65535")
        if self.model is not None:
            from pointup.model.upsampler import Upsampler

            # An error here is for the one who starts the page, not for each visitor.
            Upsampler.from_pretrained(self.model)
        with TemporaryDirectory(prefix="pointup-demo-") as folder:
            app = demo_app(Path(folder), self.model, self.max_megabytes)
            import uvicorn

            print(f"http://{self.host}:{self.port} (end with Ctrl+C)", flush=True)
            uvicorn.run(app, host=self.host, port=self.port, log_level="warning")
        return 0


def demo_app(folder: Path, model: str | None = None, max_megabytes: int = 200) -> FastAPI:
    """The page, and the addresses of its viewer files, which are kept in `folder`.

    Raises ConfigError without Gradio.
    """
    # Nothing is reported to Gradio's makers.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio as gr
        from fastapi import FastAPI, HTTPException
        from fastapi.responses import HTMLResponse
    except ImportError:
        raise ConfigError("the demo needs Gradio: pip install 'pointup[demo]'") from None

    app = FastAPI()

    # Gradio itself offers HTML files for download only.
    @app.get("/view/{key}")
    def view(key: str) -> HTMLResponse:
        page = folder / key / "view.html"
        if not re.fullmatch(r"[0-9a-f]{32}", key) or not page.is_file():
            raise HTTPException(404)
        return HTMLResponse(page.read_bytes())

    return gr.mount_gradio_app(
        app,
        _page(folder, model),
        path="/",
        max_file_size=max_megabytes * 10**6,
        # Fonts of the reader's system; nothing is fetched from the network.
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css="iframe.viewer { width: 100%; height: 78vh; border: 0; border-radius: 8px }",
    )


def upsample_upload(
    source: Path, model: str | None, ratio: float, folder: Path
) -> tuple[Path, str, str]:
    """Upsample a file into a new folder of `folder`, with `pointup upsample` in its own process.

    Returns the written file, the key of its viewer file, and what the command printed. Raises
    ValueError with the message of the command if it fails.
    """
    from uuid import uuid4

    from pointup.io.files import writable_extensions

    key = uuid4().hex
    suffix = source.suffix if source.suffix.lower() in writable_extensions else ".ply"
    target = folder / key / f"{source.stem}_dense{suffix}"
    target.parent.mkdir(parents=True)
    words = ["--ratio", str(ratio), "--view", str(folder / key / "view.html")]
    words += ["--model", model] if model else []
    # In its own process: its memory is free afterwards, and it may end without ending the page.
    command = [sys.executable, "-m", "pointup", "upsample", str(source), "-o", str(target), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise ValueError(f"took longer than {LONGEST // 60} minutes; cut the file") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise ValueError(
            lines[-1].removeprefix("pointup: error: ").replace(f"{source.parent}/", "")
        )
    printed = [line for line in done.stdout.splitlines() if "view.html" not in line]
    text = "\n".join(line for line in printed if not line.startswith("next: "))
    return target, key, text.replace(f"{source.parent}/", "").replace(f"{target.parent}/", "")


def _page(folder: Path, model: str | None) -> Blocks:
    import gradio as gr

    from pointup.io.files import point_extensions
    from pointup.model.hub import SHIPPED

    def upsample(path: str | None, name: str, ratio: float) -> tuple[str, str, str]:
        if path is None:
            raise gr.Error("choose a file first")
        chosen = None if name == BY_FORMAT else name
        try:
            target, key, text = upsample_upload(Path(path), chosen, ratio, folder)
        except ValueError as error:
            raise gr.Error(str(error)) from None
        return f'<iframe class="viewer" src="/view/{key}"></iframe>', str(target), text

    with gr.Blocks(title="pointup") as page:
        gr.Markdown(WORDS)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                upload = gr.File(label="Points", file_types=list(point_extensions))
                names = [BY_FORMAT, *SHIPPED, *([model] if model else [])]
                chosen = gr.Dropdown(names, value=model or BY_FORMAT, label="Model")
                ratio = gr.Slider(1.5, 16, value=4, step=0.5, label="Output points for each point")
                button = gr.Button("Upsample", variant="primary")
                download = gr.File(label="Result", interactive=False)
                printed = gr.Textbox(label="Report", lines=4, interactive=False)
            with gr.Column(scale=3):
                viewer = gr.HTML(label="Before and after")
        # One file at a time: each takes all cores.
        button.click(
            upsample, [upload, chosen, ratio], [viewer, download, printed], concurrency_limit=1
        )
    return page
