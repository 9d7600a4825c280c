"""A page in a real browser controlled over the DevTools protocol of Chromium."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import websocket

from tests.browser import HEADLESS
from tests.http_server import serving

LIMIT_S = 60.0  # of one wait; a busy machine needs seconds
_KEYS = {"Tab": 9, "Enter": 13, "Backspace": 8, "ArrowDown": 40, "a": 65, " ": 32}
_CONTROL = 2


class Tab:
    """One page. Waits end after LIMIT_S with an error that names the condition."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=LIMIT_S, suppress_origin=True)
        self._number = 0
        self.requests: list[str] = []
        """Addresses that the page has asked for."""
        self.errors: list[str] = []
        """What its scripts raised, and what the console was told as an error."""
        for domain in ("Page", "Runtime", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol; return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, event_params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(event_params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event_params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event_params["type"] == "error":
            self.errors.append(json.dumps(event_params["args"]))

    def look(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and await a promise."""
        reply = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if value := self.look(expression):
                return value
            time.sleep(0.02)
        raise AssertionError(f"not within {LIMIT_S:.0f} s: {expression}; errors: {self.errors}")

    def open(self, url: str) -> None:
        """Open an address."""
        self.ask("Page.navigate", url=url)

    def click(self, selector: str) -> None:
        """Click in the middle of the first matching element, scrolled into view."""
        x, y = self.look(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into the focused element, key by key."""
        for character in text:
            self.ask("Input.dispatchKeyEvent", type="char", text=character)

    def press(self, key: str, *, control: bool = False) -> None:
        """Press one key."""
        held = {"key": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": _CONTROL if control else 0}
        texts = {"Enter": "\r", " ": " "}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **held, text=texts.get(key, ""))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **held)

    def fill(self, selector: str, text: str) -> None:
        """Click into a field, clear it and type."""
        self.click(selector)
        self.press("a", control=True)
        self.press("Backspace")
        self.type(text)

    def size(self, width: int, height: int) -> None:
        """Set the size of the window in pixels."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme, ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def cut_the_network(self) -> None:
        """Block all further requests."""
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.ask("Network.emulateNetworkConditions", **offline)

    def picture(self, path: Path) -> None:
        """Write a screenshot of the window as PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """Start a browser with an empty page for the duration of the block."""
    profile.mkdir(parents=True, exist_ok=True)
    command = [
        *HEADLESS,
        "--disable-quic",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield Tab(_debugger(profile / "DevToolsActivePort"))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _debugger(file: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if file.exists() and file.read_text().count("\n"):
            port = file.read_text().split("\n")[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT_S) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("the browser has not started")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on 127.0.0.1; yields its address."""

    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *connection: Any) -> None:
            super().__init__(*connection, directory=str(folder))

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with serving(Files) as url:
        yield url
