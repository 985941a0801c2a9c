"""Pages in a real browser: Chromium without a window, driven over DevTools' pipe, so no driver is installed.

    def test_it(browser):  # the fixture; skips where no Chromium is found
        with browser.open(url, 390, 844) as page:
            page.click("#more")
            page.wait("document.querySelectorAll('li').length === 3")
            assert page.eval("document.title") == "Three"
            assert not page.errors

The protocol: https://chromedevtools.github.io/devtools-protocol/ (messages are JSON, each ended by a NUL).
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The pipe is file descriptors 3 and 4; a shell puts them where the standard ones arrive.
SHELL = ("sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers have no user namespaces; only pages of these tests are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)


class PageError(AssertionError):
    """What a test asked of the page threw, or did not come about in time."""


class Page:
    """One tab at one size.

    Attributes:
        errors: uncaught exceptions, console.error calls and failed loads so far, as text.
        requests: the URLs that the page has asked for so far, itself the first.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict:
        """One DevTools command to this tab; its result."""
        return self._browser.send(method, self._session, **parameters)

    def eval(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON gives it; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(_words(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, script: str, timeout: float = 5.0) -> Any:
        """Until the expression is true, as JavaScript judges; its value.  A PageError after `timeout` seconds."""
        end = time.monotonic() + timeout
        judged = f"Promise.resolve({script}).then((value) => [Boolean(value), value])"
        while not (found := self.eval(judged))[0]:
            if time.monotonic() > end:
                raise PageError(f"not true after {timeout} s: {script}; errors: {self.errors}")
            time.sleep(0.02)
        return found[1]

    def click(self, selector: str) -> None:
        """A real click with the mouse in the middle of the first element that matches."""
        find = f"document.querySelector({json.dumps(selector)})"
        if not self.eval(f"{find} !== null"):
            raise PageError(f"nothing on the page matches {selector}")
        self.eval(f"{find}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})")
        box = self.eval(f"{find}.getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key: str) -> None:
        """A key that writes nothing, by its DOM name (ArrowRight, Tab, Home), to what has the focus."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}
        codes |= {"Tab": 9, "Enter": 13, "Escape": 27}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, **named)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def screenshot(self, path: str | Path, *, whole: bool = False) -> None:
        """What is seen, or the whole page, as a PNG."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def hear(self, method: str, event: dict) -> None:
        """Called by the browser with each event of this tab."""
        if method == "Runtime.exceptionThrown":
            self.errors.append(_words(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] == "error":
            self.errors.append(
                " ".join(str(part.get("value", part.get("description"))) for part in event["args"])
            )
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])


class Browser:
    """One Chromium process; each page has cookies and storage of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        command = [*SHELL, program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._pages: dict[str, Page] = {}
        self._answers: queue.Queue[dict | None] = queue.Queue()
        self._last = 0
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict:
        """One DevTools command; its result.  A PageError where it is refused or not answered in 30 s."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=30)
        except queue.Empty:
            raise PageError(f"Chromium did not answer {method}") from None
        if answer is None:
            raise PageError(f"Chromium ended at {method}, exit status {self._process.wait(5)}")
        assert answer["id"] == self._last
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    @contextmanager
    def open(
        self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False, script: bool = True
    ) -> Iterator[Page]:
        """A tab that has loaded the page, at `width` x `height` CSS pixels (below 600 wide: as a phone).

        Args:
            url: http(s)://, or file:// (`path.as_uri()`).
            width: of the window.
            height: of the window.
            dark: what the page hears for prefers-color-scheme.
            script: False to see the page with JavaScript switched off.
        """
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            page.send("Emulation.setDeviceMetricsOverride", **shape)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.send("Emulation.setEmulatedMedia", features=[scheme])
            page.send("Emulation.setScriptExecutionDisabled", value=not script)
            failed = page.send("Page.navigate", url=url).get("errorText")
            if failed:
                raise PageError(f"{url}: {failed}")
            page.wait("document.readyState === 'complete' && location.href !== 'about:blank'", 20)
            yield page
        finally:
            del self._pages[session]
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """End the process."""
        self.send("Browser.close")
        self._process.wait(10)

    def _read(self) -> None:
        """Sort what arrives: events to their tabs, answers to who waits."""
        assert self._process.stdout is not None
        rest = b""
        while part := os.read(self._process.stdout.fileno(), 1 << 16):
            *whole, rest = (rest + part).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._answers.put(message)
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].hear(message["method"], message["params"])
        self._answers.put(None)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, started once for all tests."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    started = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


def _words(details: dict) -> str:
    return details.get("exception", {}).get("description") or details["text"]
