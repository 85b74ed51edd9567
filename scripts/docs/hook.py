"""Add to the site what docs/ does not hold: the page of config keys, and files of the repository that pages show.

A hook of mkdocs (mkdocs.yml). After the build it fails if a page would load anything from another server.
"""

import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))

from config_reference import page as config_page  # noqa: E402

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")
LOADS = {"link": "href"} | dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src")
"""Attribute by which an element loads a file"""


def outside(link: str, uri: str) -> str | None:
    """Return the path in the repository of a file outside docs/ that the page ``uri`` links to; None: it is inside."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), link))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "config.md", content=config_page()))
    linked = set()
    for file in files.documentation_pages():
        for link in LINK.findall(file.content_string):
            if (path := outside(link, file.src_uri)) and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def inside(match: re.Match[str]) -> str:
        path = outside(match[1], page.file.src_uri)
        return match[0] if path is None else f"]({posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or '.')}"

    return LINK.sub(inside, markdown)


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(LOADS.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address) and values.get("rel") != "canonical":
            self.remote.append(address)


def on_post_build(config: Any) -> None:
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        parser = _Loads()
        parser.feed(path.read_text(encoding="utf-8"))
        if parser.remote:
            raise PluginError(f"{path} loads {parser.remote[0]}: expected only files of the site")
