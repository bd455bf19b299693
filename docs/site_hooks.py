"""Pages of the site that live elsewhere in the repository, with their links turned into links of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
# Code hosts need a backslash before a bar in a table, also in code; here code shows it.
CODE_IN_TABLE = re.compile(r"^\|.*`.*\|$", flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the pictures they show."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=site_text(source, text)))
        for picture in pictures(source, text):
            files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links of docs/ to files of the repository that are pages here to those pages; mend code in tables."""
    here = posixpath.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, match[1]))
        return posixpath.relpath(PAGES[path], here or ".") if path in PAGES else match[1]

    return CODE_IN_TABLE.sub(lambda m: m[0].replace(r"\|", "|"), LINK.sub(lead, markdown))


def site_text(source: str, text: str) -> str:
    """Turn the links of a file in the repository into links of its page, which lies at the top of the site."""

    def lead(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return PAGES.get(path, path.removeprefix("docs/"))

    return LINK.sub(lead, text)


def pictures(source: str, text: str) -> Iterator[str]:
    """Paths, from the root of the repository, of the pictures outside docs/ that a page shows."""
    for link in LINK.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path.endswith((".png", ".svg", ".jpg")) and not path.startswith("docs/"):
            yield path
