"""Adds pages whose text is elsewhere in the repository; makes links lead to pages (mkdocs hooks).

Everything is found beside mkdocs.yml: the site does not depend on how pointup was installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    **{
        f"models/{name}.md": f"pointup/weights/{name}/README.md"
        for name in ("lidar", "forest", "shapes", "noisy")
    },
}
"""Page of the site, and the file that holds its text."""
PAGE_OF = {ROOT / source: page for page, source in PAGES.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links between files of the repository links between pages."""
    uri = page.file.src_uri
    folder = (ROOT / PAGES[uri] if uri in PAGES else DOCS / uri).parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target in PAGE_OF:
            target = DOCS / PAGE_OF[target]
        elif not target.is_relative_to(DOCS):
            return match[0]
        return f"]({os.path.relpath(target, (DOCS / uri).parent)}"

    return re.sub(r"\]\(((?!https?:)[^)#\s]+)", link, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Makes links of a notebook to files lead to pages, which the plugin leaves out."""
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    return re.sub(r'href="\.\./([\w/]+)\.md"', r'href="../../\1/"', output)
