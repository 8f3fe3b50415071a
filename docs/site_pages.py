"""Adds pages whose text is elsewhere in the repository, and links in notebooks (mkdocs hooks)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    **{
        f"models/{name}.md": f"pointup/weights/{name}/README.md"
        for name in ("lidar", "forest", "shapes", "noisy")
    },
}
"""Page of the site, and the file that holds its text."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages; their links to files in docs/ become links between pages."""
    for page, source in PAGES.items():
        up = "../" * page.count("/")
        text = re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Makes links of a notebook to files lead to pages, which the plugin leaves out."""
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    return re.sub(r'href="\.\./([\w/]+)\.md"', r'href="../../\1/"', output)
