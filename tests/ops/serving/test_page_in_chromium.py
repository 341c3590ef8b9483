"""Tests in a browser that the page shows its content at every width, and explains a lease."""

import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import uvicorn
from browser import Page, faults_for_readers
from served_tables import EVIL, Table, held

from leasehold.adapters.ops.serving.app import saved_page, server
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.balancer.config import Config
from leasehold.stores.writes import StealLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

pytestmark = pytest.mark.more


@pytest.fixture
def url() -> Iterator[str]:
    """Serve the page of a fleet in which a lease has just moved, and yield its URL."""
    table = Table()
    for row in (held("s-0", "a", 12.5), held("s-1", "a"), held(EVIL, "b")):
        create_lease_with_owner(table, row)
    watcher = TableWatcher("memory://x", table, Config(), FleetRecord(), every=60.0)
    watcher.look()
    expect_applied(table.write(StealLease(table.get(["s-1"])[0], "c")))
    watcher.look()
    config = uvicorn.Config(server([watcher], ["127.0.0.1"]), port=0, log_level="error", lifespan="off")
    listening_socket = config.bind_socket()
    listening_socket.listen()
    page_server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: page_server.run(sockets=[listening_socket]))
    thread.start()
    yield f"http://127.0.0.1:{listening_socket.getsockname()[1]}/"
    page_server.should_exit = page_server.force_exit = True
    thread.join()
    listening_socket.close()


def test_the_page_shows_leases_moves_and_explains_on_click(chromium: str, tmp_path: Path, url: str) -> None:
    with closing(Page(chromium, tmp_path, url)) as page:
        page_text = page.until("document.querySelectorAll('#leases tr').length > 1 && document.body.innerText")
        for text in ("12.5 s", "vm-7", "memory://x", "rules minimal"):
            assert text in page_text, text
        moves = page.evaluate("document.getElementById('moves').innerText")
        assert moves.split()[-4:] == ["s-1", "a", "c", "H2"]
        page.evaluate("[...document.querySelectorAll('#leases button')].find(one => one.textContent === 's-0').click()")
        explanation = page.until("document.getElementById('explain').open && document.getElementById('said').innerText")
        assert "Should have it: a: it holds 1 where its share is 1" in explanation
        assert page.evaluate("document.querySelectorAll('#leases b').length") == 0


def test_a_saved_page_sorts_filters_and_explains_without_a_server(chromium: str, tmp_path: Path) -> None:
    """The saved file shows the same as the served page."""
    table, file = Table(), tmp_path / "page.html"
    for row in (held("s-0", "a", 12.5), held("s-1", "a"), held(EVIL, "b")):
        create_lease_with_owner(table, row)
    watcher = TableWatcher("memory://x", table, Config(), FleetRecord(), every=60.0)
    watcher.look()
    file.write_text(saved_page([watcher]), encoding="utf-8")
    with closing(Page(chromium, tmp_path, file.as_uri())) as page:
        page_text = page.until("document.querySelectorAll('#leases tbody tr').length === 3 && document.body.innerText")
        for text in ("12.5 s", "vm-7", "memory://x", "rules minimal"):
            assert text in page_text, text
        page.evaluate("document.querySelector('[data-sort=key]').click()")
        keys = "[...document.querySelectorAll('#leases tbody td:first-child')].map(one => one.textContent).join()"
        assert page.evaluate(keys) == ",".join(sorted(("s-0", "s-1", EVIL)))
        page.evaluate("[...document.querySelectorAll('#leases button')].find(one => one.textContent === 's-0').click()")
        explanation = page.until("document.getElementById('explain').open && document.getElementById('said').innerText")
        assert "Should have it: a" in explanation
        assert page.evaluate("document.querySelectorAll('#leases b').length") == 0


def test_the_page_sorts_and_filters_by_keyboard_and_keeps_the_focus(chromium: str, tmp_path: Path, url: str) -> None:
    keys = "[...document.querySelectorAll('#leases td:first-child')].map(one => one.innerText.trim())"
    with closing(Page(chromium, tmp_path, url)) as page:
        page.until("document.querySelectorAll('#leases tr').length > 1")
        page.evaluate("document.querySelector('[data-sort=key]').focus()")
        page.evaluate("document.activeElement.click()")
        page.until("document.querySelector('[aria-sort=ascending] [data-sort=key]') !== null")
        assert page.until(f"{keys}.length === 3 && {keys}")[1:] == ["s-0", "s-1"]
        assert page.evaluate("document.activeElement.dataset.sort") == "key"
        page.evaluate(
            "const f = document.getElementById('filter'); f.value = 'S-1'; f.dispatchEvent(new Event('input'))"
        )
        assert page.until(f"{keys}.length === 1 && {keys}") == ["s-1"]
        page.drawn(390, 1000, dark=False)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_the_page_renders_wide_narrow_and_dark(
    chromium: str, tmp_path: Path, url: str, width: int, *, dark: bool
) -> None:
    """The page is not blank, its text has a different color than the background, and the curve is drawn."""
    with closing(Page(chromium, tmp_path, url)) as page:
        page.until(
            "document.querySelectorAll('#leases tr').length > 1 && document.querySelector('#lag polyline') !== null"
        )
        picture = page.drawn(width, 1000, dark=dark)
        color_expressions = (
            "getComputedStyle(document.body).color, getComputedStyle(document.querySelector('polyline')).stroke"
        )
        text_color, curve_color = page.evaluate(f"[{color_expressions}]")
    assert struct.unpack(">II", picture[16:24]) == (width, 1000)
    assert (text_color, curve_color) == (
        ("rgb(229, 234, 240)", "rgb(110, 168, 224)") if dark else ("rgb(28, 36, 48)", "rgb(47, 111, 178)")
    )
    assert len(picture) > 40_000  # a picture without data has about half this size


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
@pytest.mark.parametrize("opened", [False, True])
def test_the_page_is_accessible(
    chromium: str, axe: str, tmp_path: Path, url: str, width: int, *, dark: bool, opened: bool
) -> None:
    """No text is too pale to read, every button has a name, and every table can be scrolled by keyboard."""
    with closing(Page(chromium, tmp_path, url)) as page:
        page.until("document.querySelectorAll('#leases tr').length > 1")
        page.drawn(width, 1000, dark=dark)
        if opened:
            page.evaluate("document.querySelector('#leases td button').click()")
            page.until("document.getElementById('explain').open && document.getElementById('said').innerText")
        assert faults_for_readers(page, axe) == []
