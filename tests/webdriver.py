"""A real Chromium, driven by chromedriver over plain HTTP; tests that need one skip where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
DEADLINE = 120
"""Seconds that an answer may take; it is long, since other tests use the machine, too."""


def absent() -> str:
    """Return why there is no browser, or an empty text."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs a real browser; not installed: {', '.join(missing)}" if missing else ""


class Browser:
    """A page of a browser."""

    def __init__(self, address: str) -> None:
        self._address = address
        arguments = [*OPTIONS, "--window-size=1280,900"]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/{made['sessionId']}"

    def open(self, url: str) -> None:
        """Go to a page; returns when it is loaded.  The blank page between makes a fragment count."""
        self._post("/url", url="about:blank")
        self._post("/url", url=url)

    def run(self, script: str) -> Any:
        """Run a script, the body of a function, and return what it returns."""
        return self._post("/execute/sync", script=script, args=[])

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def drag(self, begin: float, end: float, y: float) -> None:
        """Drag the mouse between two places of the window at the same height."""
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y)} for x in (begin, end)]
        down, up = ({"type": f"pointer{name}", "button": 0} for name in ("Down", "Up"))
        mouse = {"type": "pointer", "id": "mouse", "actions": [moves[0], down, moves[1], up]}
        self._post("/actions", actions=[mouse])

    def narrow(self, width: int) -> None:
        """Show pages as a phone with this width does; a window cannot be as narrow."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        self._post("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)

    def said(self) -> list[str]:
        """Return what the console has received since the last call."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def close(self) -> None:
        """End the browser."""
        self._ask("DELETE", self._session)

    def _post(self, path: str, **body: Any) -> Any:
        return self._ask("POST", self._session + path, body)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._address}/session{path}", data, method=method)
        with urlopen(request, timeout=DEADLINE) as answer:
            return json.load(answer)["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it."""
    driver, port = _driver()
    with driver:
        try:
            opened = Browser(f"http://127.0.0.1:{port}")
            try:
                yield opened
            finally:
                opened.close()
        finally:
            driver.terminate()


def _driver() -> tuple[subprocess.Popen[str], int]:
    """Start a driver, and return its port.

    It chooses a port, and ends at once if another program takes that one before it does.
    """
    for _ in range(5):
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        for line in driver.stdout:
            if found := re.search(r"on port (\d+)\.", line):
                return driver, int(found[1])
        driver.communicate()
    raise RuntimeError("chromedriver ended five times before it named its port")
