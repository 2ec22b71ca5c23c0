"""A headless chromium for tests of pages: viewport, theme, messages of the console, values computed in the page.

It speaks the devtools protocol over a pipe (file descriptors 3 and 4 of the browser), so it needs no other package.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
FOUND = next((path for path in map(shutil.which, NAMES) if path is not None), None)
REASON = f"no browser is installed ({', '.join(NAMES)})"
PATIENCE = 120  # seconds for one answer; the machine may be busy
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
    "--mute-audio",
)


class Browser:
    """One tab of a browser. events: all that it has told, in order."""

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = send, receive
        self.events: list[dict[str, Any]] = []
        self.rest = b""
        self.count = 0
        self.session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        answer = self.until(lambda found: found.get("id") == self.count)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def until(self, wanted) -> dict[str, Any]:
        """The first message that is wanted; the others are events."""
        end = monotonic() + PATIENCE
        while True:
            while b"\0" in self.rest:
                line, _, self.rest = self.rest.partition(b"\0")
                message = json.loads(line)
                if wanted(message):
                    return message
                self.events.append(message)
            assert select.select([self.receive], [], [], max(end - monotonic(), 0))[0], "the browser does not answer"
            self.rest += os.read(self.receive, 1 << 20)

    def open(self, path: Path, width: int = 1280, height: int = 900, theme: str = "light", media: str = "") -> None:
        """Load a file in a viewport of so many pixels, in a theme, on screen or for print."""
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self("Emulation.setEmulatedMedia", media=media, features=features)
        self("Page.navigate", url=path.resolve().as_uri())
        self.until(lambda found: found.get("method") == "Page.loadEventFired")

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def messages(self) -> list[str]:
        """All errors and messages of the console since the page was opened."""
        kinds = "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
        return [json.dumps(found["params"]) for found in self.events if found.get("method") in kinds]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for, without those that are data."""
        asked = [f["params"]["request"]["url"] for f in self.events if f.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A running browser, with its profile in a folder."""
    assert FOUND is not None, REASON
    from_us, to_us = os.pipe(), os.pipe()  # (read, write)

    def connect() -> None:
        for end, number in ((os.dup(from_us[0]), 3), (os.dup(to_us[1]), 4)):
            os.dup2(end, number)

    command = [FOUND, *ARGUMENTS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=connect
    )
    os.close(from_us[0])
    os.close(to_us[1])
    try:
        yield Browser(from_us[1], to_us[0])
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(from_us[1])
        os.close(to_us[0])
