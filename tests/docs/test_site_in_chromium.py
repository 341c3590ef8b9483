"""Tests the site in a browser: readers with low vision, without a mouse, or on a phone can read all of it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Page, faults_for_readers
from pages import ROOT

pytestmark = [pytest.mark.more, pytest.mark.slow]

PAGES = ["", "start/", "theory/", "choosing-a-store/", "handlers/"]


class SilentFileHandler(SimpleHTTPRequestHandler):
    """Serves files without logging requests."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site, serve it, and yield its address."""
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(folder))
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentFileHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(chromium: str, axe: str) -> tuple[str, str]:
    """Return the browser and the source of axe-core."""
    return chromium, axe


@pytest.mark.parametrize("screen", [(1280, False), (1280, True), (390, False)])
@pytest.mark.parametrize("page", PAGES)
def test_each_page_of_the_site_is_accessible(
    browser: tuple[str, str], tmp_path: Path, site: str, page: str, screen: tuple[int, bool]
) -> None:
    """No text is too pale, no picture lacks a description, and no text extends beyond the edge of a phone."""
    with closing(Page(browser[0], tmp_path, site + page)) as browser_page:
        browser_page.until("document.readyState === 'complete' && document.querySelector('article') !== null")
        browser_page.drawn(screen[0], 1000, dark=screen[1])
        assert browser_page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert faults_for_readers(browser_page, browser[1]) == []
