"""Writes the viewer: one HTML file with its scripts, its style and the points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import pointup
from pointup.errors import FileError
from pointup.io.cloud import write_file
from pointup.terminal import printable
from pointup.visualization.viewer.encoding import Blocks, encode_colormaps, encode_scene
from pointup.visualization.viewer.layers import Scene

SCRIPTS = (
    "decode.js", "shaders.js", "cloud.js", "viewpoint.js", "stage.js", "overlay.js", "tools.js",
    "panel.js", "link.js", "main.js",
)  # fmt: skip
"""Scripts of the page, in the order in which they run. Each uses only what is before it."""


def write_viewer(path: str | Path, scenes: Sequence[Scene], title: str = "") -> int:
    """Write scenes into one HTML file that works offline. Returns its size in bytes.

    Raises FileError if the file can't be written or is not named .html or .htm.
    """
    return write_page(Path(path), viewer_html(scenes, title or scenes[0].name))


def write_page(path: Path, html: str) -> int:
    """Write an HTML file, all or nothing. Returns its size in bytes.

    Names of files in it may have bytes that are not UTF-8, see `printable`.
    """
    check_viewer_path(path)
    content = printable(html).encode()
    write_file(path, content)
    return len(content)


def check_viewer_path(path: Path) -> None:
    """Raise FileError for a path that the viewer can't be written to. Call it before the work."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise FileError(f"{path}: the viewer is an HTML file; name it .html")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {path.parent}; make it")


def viewer_html(scenes: Sequence[Scene], title: str) -> str:
    """The page as text; see `write_viewer`."""
    blocks = Blocks()
    content = {
        "title": title,
        "version": pointup.__version__,
        "colormaps": encode_colormaps(),
        "scenes": [encode_scene(scene, blocks) for scene in scenes],
    }
    # No "<", which could end the script element.
    manifest = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    page = files("pointup.visualization.viewer") / "page"
    licence = (page / "vendor" / "three.LICENSE").read_text(encoding="utf-8")
    scripts = [
        f"<script>\n/* three.js, https://threejs.org\n{licence}*/\n"
        f"{(page / 'vendor' / 'three.min.js').read_text(encoding='utf-8')}</script>"
    ]
    scripts += [
        f"<script>\n{(page / name).read_text(encoding='utf-8')}</script>" for name in SCRIPTS
    ]
    data = [f'<script type="application/json" id="manifest">{manifest}</script>']
    data += [
        f'<script type="text/plain" id="block{number}">{text}</script>'
        for number, text in enumerate(blocks.texts)
    ]
    html = (page / "viewer.html").read_text(encoding="utf-8")
    for mark, text in (("DATA", "\n".join(data)), ("SCRIPTS", "\n".join(scripts))):
        html = html.replace(f"<!--{mark}-->", text)
    return html_head(title, (page / "viewer.css").read_text(encoding="utf-8")) + html


def html_head(title: str, style: str) -> str:
    """What comes before the body of a page: its title (text) and its style (CSS)."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
"""
