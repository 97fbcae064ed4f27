"""A headless Chromium, driven through the DevTools protocol over a pipe: no port, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
LIMIT_S = 60
# Chromium reads commands from descriptor 3 and writes to 4
LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. Use it in a `with` block."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False):
        assert CHROMIUM is not None
        self.profile = tempfile.mkdtemp()
        command_read, self.command = os.pipe()
        self.reply, reply_write = os.pipe()
        arguments = [sys.executable, "-c", LAUNCH, str(command_read), str(reply_write), CHROMIUM, *OPTIONS]
        self.process = subprocess.Popen(
            [*arguments, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(command_read, reply_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(reply_write)
        self.rest = b""
        self.number = 0
        self.session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        (target, *_) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self.command)
        os.close(self.reply)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            assert select.select([self.reply], [], [], LIMIT_S)[0], f"chromium did nothing for {LIMIT_S} s"
            piece = os.read(self.reply, 65536)
            assert piece, "chromium has ended"
            self.rest += piece
        message, _, self.rest = self.rest.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        parameters = received.get("params", {})
        if received.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        if received.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return received

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.command, json.dumps(message).encode() + b"\0")
        while (received := self._receive()).get("id") != self.number:
            pass
        assert "error" not in received, received
        result: dict[str, Any] = received["result"]
        return result

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until it has run."""
        for url in ("about:blank", path.resolve().as_uri() + fragment):  # another fragment alone would load nothing
            self.call("Page.navigate", url=url)
            while self._receive().get("method") != "Page.loadEventFired":
                pass

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as a person presses it."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **(text if kind == "keyDown" else {}))

    def move(self, selector: str) -> None:
        """The mouse, onto the middle of an element."""
        script = f"(b => [b.left + b.width / 2, b.top + b.height / 2])(document.querySelector({json.dumps(selector)})"
        x, y = self.run(f"{script}.getClientRects()[0])")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
