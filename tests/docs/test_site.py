"""The site: built strictly without a network, every public name in it, nothing loaded from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dbksvd_dask

ROOT = Path(__file__).parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
# Building in a process whose sockets refuse to connect shows that it needs no network.
OFFLINE = """
import socket, sys

def refuse(*_):
    raise RuntimeError("the build of the site asked for a network")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from mkdocs.__main__ import cli
cli(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not all(importlib.util.find_spec(name) for name in NEEDED):
        pytest.skip("needs the extra docs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site):
    return {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_every_public_name_is_in_the_reference(site):
    reference = "".join(text for name, text in pages(site).items() if name.startswith("api"))
    for name in set(dbksvd_dask.__all__) - {"__version__"}:
        assert f'id="dbksvd_dask.{name}"' in reference, f"{name}: add `::: dbksvd_dask.{name}` to docs/api/"


def test_pages_load_nothing_from_elsewhere(site):
    loading = re.compile(
        r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//[^"]*"|<link[^>]* href="(?:https?:)?//[^"]*"'
    )
    for name, text in pages(site).items():
        assert not loading.findall(text), name
        assert 'class="mermaid"' not in text, f"{name}: the theme fetches mermaid from a server"


def test_links_inside_the_repository_are_links_of_the_site(site):
    found = pages(site)
    links = re.findall(r'href="([\w/.-]+\.(?:html|md))', found["index.html"])
    assert {"settings.html", "cluster.html", "benchmarks.html", "contributing.html", "installation.html"} <= set(
        links
    )
    assert not [link for link in links if link.endswith(".md")]
    assert (site / "benchmarks" / "results" / "peers_small.png").exists()


def test_lists_and_tables_are_rendered_as_such(site):
    """A list needs an empty line before it here, though code hosts show it without one."""
    for name, text in pages(site).items():
        raw = re.findall(r"<p>[^<]*(?:<(?!/p>)[^<]*)*?\n(?:- |\d+\. |\| )[^\n]*", text)
        assert not raw, (name, raw[0][-200:])
        assert r"\|" not in text, name


@pytest.mark.parametrize("folder", [ROOT / "docs", ROOT], ids=["docs", "root"])
def test_links_work_in_the_repository_too(folder):
    for path in folder.glob("**/*.md" if folder.name == "docs" else "*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_files_named_in_the_design_exist():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z]+/)?[a-z_]+\.py)`", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "dbksvd_dask" / name).exists()] == []
