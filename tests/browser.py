"""A headless browser in which tests open pages, and a check of their accessibility with axe-core."""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any


class Page:
    """A page in a browser, controlled through the browser's own protocol over two pipes."""

    def __init__(self, chromium: str, folder: Path, url: str) -> None:
        child_end, self._to = os.pipe()
        self._from, response_pipe = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        command = (chromium, *flags, f"--user-data-dir={folder}/profile")
        shell = ("bash", "-c", f'exec "$@" 3<&{child_end} 4>&{response_pipe}', "bash", *command)
        self._browser = subprocess.Popen(shell, pass_fds=(child_end, response_pipe), stderr=subprocess.DEVNULL)
        os.close(child_end)
        os.close(response_pipe)
        self._read, self._count = b"", 0
        target = self._ask("Target.createTarget", url=url)["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(self, script: str) -> Any:  # noqa: ANN401  any JSON value
        """Evaluate this JavaScript expression, and return its value."""
        response = self._ask("Runtime.evaluate", session=self._session, expression=script, returnByValue=True)
        return response["result"].get("value")

    def until(self, script: str) -> Any:  # noqa: ANN401  likewise
        """Wait until this JavaScript expression has a truthy value, and return the value."""
        while not (value := self.evaluate(script)):
            pass  # each call waits for the browser, so no pause is needed
        return value

    def drawn(self, width: int, height: int, *, dark: bool) -> bytes:
        """Show the page on a screen of this size, and return a screenshot as PNG."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setEmulatedMedia", session=self._session, features=[scheme])
        self._ask("Emulation.setDeviceMetricsOverride", session=self._session, **size)
        picture: str = self._ask("Page.captureScreenshot", session=self._session)["data"]
        return base64.b64decode(picture)

    def close(self) -> None:
        self._browser.terminate()
        self._browser.wait(30)
        os.close(self._to)
        os.close(self._from)

    def _ask(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._count += 1
        request = {"id": self._count, "method": method, "params": parameters}
        os.write(self._to, json.dumps(request | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                self._read += os.read(self._from, 65_536)
            message, _, self._read = self._read.partition(b"\0")
            response: dict[str, Any] = json.loads(message)
            if response.get("id") == self._count:
                return dict(response["result"])


def faults_for_readers(page: Page, axe: str) -> list[str]:
    """Return the violations of WCAG 2 level AA on this page, each with its rule, element and problem.

    Args:
        page: The page to check.
        axe: The source of axe-core.
    """
    page.evaluate(axe)
    options = json.dumps(
        {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}}
    )
    page.evaluate(f"window.found = null; axe.run(document, {options}).then(told => window.found = told)")
    violations = page.until("window.found && JSON.stringify(window.found.violations)")
    return [
        f"{rule['id']} {node['target'][0]}: {node['failureSummary'].splitlines()[-1].strip()}"
        for rule in json.loads(violations)
        for node in rule["nodes"]
    ]
