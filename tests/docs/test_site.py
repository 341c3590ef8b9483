"""The pages as a site: built strictly, complete, and from this host alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

from leasehold import adapters, balancer, stores

pytestmark = pytest.mark.slow

LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^"'> ]+"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*href=["']?(?:https?:)?//[^"'> ]+"""
    r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^"') ]+"""
)
"""What a browser fetches from another host without being asked."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew; a link to nowhere, or a page that no menu names, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built_and_in_the_menu(site: Path) -> None:
    """A page that nothing leads to is never read."""
    front = (site / "index.html").read_text(encoding="utf-8")
    pages = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index")
    assert [name for name in pages if f'href="{name}/"' not in front] == []


def test_no_file_of_the_site_comes_from_another_host(site: Path) -> None:
    """Who reads behind a firewall would wait for fonts, and who reads anywhere would be counted by somebody."""
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css"}]
    assert {found[0] for path in files for found in LOADED.finditer(path.read_text(encoding="utf-8"))} == set()


def test_search_finds_user_pages_alone(site: Path) -> None:
    """The search index holds every page for users and nothing else: no changelog, specs, results or architecture."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0].rstrip("/") for entry in index["docs"]}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"architecture"}
    assert found == {"" if page == "index" else page for page in pages}


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    """A user would have to read the source for what is promised."""
    page = (site / "reference" / "index.html").read_text(encoding="utf-8")
    named = [(package, name) for package in (balancer, stores, adapters) for name in package.__all__]
    found = set(re.findall(r'id="([\w.]+)"', page))
    # A module of the same name hides `plan` and `execute`.
    assert [
        name
        for package, name in named
        if not found & {f"{package.__name__}.{name}", f"{package.__name__}.{name}.{name}"}
    ] == []


def test_no_code_is_cut_and_every_picture_says_what_to_see(site: Path) -> None:
    """A line that ends at the edge of a phone is a command that fails; a graph alone is read as its reader likes."""
    style = (site / "theme" / "leasehold.css").read_text(encoding="utf-8")
    assert "white-space: pre-wrap" in style
    assert re.search(r"\.language-text code \{[^}]*white-space: pre;", style)  # drawings keep their columns
    assert 'class="language-text highlight"' in (site / "architecture" / "index.html").read_text(encoding="utf-8")
    uncaptioned = []
    for page in site.rglob("*.html"):
        drawings = page.read_text(encoding="utf-8").split('<figure class="drawn">')[1:]
        for each in drawings:
            rest = each.partition("</figure>")[2].lstrip()
            if not rest.startswith("<p>What to see: "):
                uncaptioned.append(page.parent.name)
    assert uncaptioned == []


def test_the_moving_picture_rests_for_those_who_ask_for_it(site: Path) -> None:
    """Motion makes some readers ill; they have said so to their system."""
    home = (site / "index.html").read_text(encoding="utf-8")
    picture = home.partition('class="kill"')[2].partition("</svg>")[0]
    assert "@media (prefers-reduced-motion: reduce) { .kill .moving { animation: none; } }" in picture
    assert set(re.findall(r"animation-name: (kill-[\w-]+)", picture)) == set(
        re.findall(r"@keyframes (kill-[\w-]+)", picture)
    )
