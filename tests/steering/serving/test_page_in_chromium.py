"""The page as a browser draws it: its content, wide and narrow, and the explanation of a lease."""

import base64
import json
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from test_serving import EVIL, Table, held

from leasehold.adapters.steering.serving.app import server
from leasehold.adapters.steering.serving.watcher import FleetRecord, TableWatcher
from leasehold.balancer.config import Config
from leasehold.stores.contract.actors import done, placed
from leasehold.stores.writes import StealLease

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser, which is Debian's package `chromium`."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("NO BROWSER: the page was not looked at; apt-get install chromium")
    return found


@pytest.fixture
def url() -> Iterator[str]:
    """A page of a fleet in which a lease has just moved."""
    table = Table()
    for row in (held("s-0", "a", 12.5), held("s-1", "a"), held(EVIL, "b")):
        placed(table, row)
    watcher = TableWatcher("memory://x", table, Config(), FleetRecord(), every=60.0)
    watcher.look()
    done(table.write(StealLease(table.get(["s-1"])[0], "c")))
    watcher.look()
    config = uvicorn.Config(server([watcher], ["127.0.0.1"]), port=0, log_level="error", lifespan="off")
    listening = config.bind_socket()
    listening.listen()
    serving = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: serving.run(sockets=[listening]))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    serving.should_exit = serving.force_exit = True
    thread.join()
    listening.close()


class Page:
    """A page that a browser has open, spoken to by the browser's own protocol over two pipes."""

    def __init__(self, chromium: str, folder: Path, url: str) -> None:
        given, self._to = os.pipe()
        self._from, answers = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        command = (chromium, *flags, f"--user-data-dir={folder}/profile")
        shell = ("bash", "-c", f'exec "$@" 3<&{given} 4>&{answers}', "bash", *command)
        self._browser = subprocess.Popen(shell, pass_fds=(given, answers), stderr=subprocess.DEVNULL)
        os.close(given)
        os.close(answers)
        self._read, self._count = b"", 0
        target = self._ask("Target.createTarget", url=url)["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(self, script: str) -> Any:  # noqa: ANN401  whatever the script makes
        """The value of this JavaScript."""
        told = self._ask("Runtime.evaluate", session=self._session, expression=script, returnByValue=True)
        return told["result"].get("value")

    def until(self, script: str) -> Any:  # noqa: ANN401  likewise
        """The value of this JavaScript, once it is one."""
        while not (found := self.evaluate(script)):
            pass  # the page is told by the server; each question waits for the browser
        return found

    def drawn(self, width: int, height: int, *, dark: bool) -> bytes:
        """The picture of the page on a screen of this size, as PNG."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setEmulatedMedia", session=self._session, features=[scheme])
        self._ask("Emulation.setDeviceMetricsOverride", session=self._session, **size)
        picture: str = self._ask("Page.captureScreenshot", session=self._session)["data"]
        return base64.b64decode(picture)

    def close(self) -> None:
        """End the browser."""
        self._browser.terminate()
        self._browser.wait(30)
        os.close(self._to)
        os.close(self._from)

    def _ask(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._count += 1
        asked = {"id": self._count, "method": method, "params": parameters}
        os.write(self._to, json.dumps(asked | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                self._read += os.read(self._from, 65_536)
            message, _, self._read = self._read.partition(b"\0")
            answer: dict[str, Any] = json.loads(message)
            if answer.get("id") == self._count:
                return dict(answer["result"])


def test_the_page_shows_leases_moves_and_an_explanation_at_a_click(chromium: str, tmp_path: Path, url: str) -> None:
    """The server could be right, and the page empty."""
    with closing(Page(chromium, tmp_path, url)) as page:
        shown = page.until("document.querySelectorAll('#leases tr').length > 1 && document.body.innerText")
        for text in ("12.5 s", "vm-7", "memory://x", "rules minimal"):
            assert text in shown, text
        moves = page.evaluate("document.getElementById('moves').innerText")
        assert moves.split()[-4:] == ["s-1", "a", "c", "H2"]
        page.evaluate("[...document.querySelectorAll('#leases button')].find(one => one.textContent === 's-0').click()")
        said = page.until("document.getElementById('explain').open && document.getElementById('said').innerText")
        assert "Should have it: a: it holds 1 where its share is 1" in said
        assert page.evaluate("document.querySelectorAll('#leases b').length") == 0


def test_the_page_sorts_and_filters_by_keyboard_and_stays_where_it_was(chromium: str, tmp_path: Path, url: str) -> None:
    """Whoever uses no mouse could look at nothing but the first leases, or lose the focus at every reading."""
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
def test_the_page_can_be_drawn_wide_narrow_and_dark(
    chromium: str, tmp_path: Path, url: str, width: int, *, dark: bool
) -> None:
    """A style that fails would leave a blank screen, or text on its own colour; or the curve would not be drawn."""
    with closing(Page(chromium, tmp_path, url)) as page:
        page.until(
            "document.querySelectorAll('#leases tr').length > 1 && document.querySelector('#lag polyline') !== null"
        )
        picture = page.drawn(width, 1000, dark=dark)
        colours = "getComputedStyle(document.body).color, getComputedStyle(document.querySelector('polyline')).stroke"
        ink, curve = page.evaluate(f"[{colours}]")
    assert struct.unpack(">II", picture[16:24]) == (width, 1000)
    assert (ink, curve) == (
        ("rgb(229, 234, 240)", "rgb(110, 168, 224)") if dark else ("rgb(28, 36, 48)", "rgb(47, 111, 178)")
    )
    assert len(picture) > 40_000  # without a reading it is half of that
