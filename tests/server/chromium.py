"""A headless Chromium, driven through its DevTools protocol over a pipe: no driver program, no WebSocket library."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def find_chromium() -> str | None:
    """The program, if there is one: that of ``CHROMIUM``, else the first known name on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of the first."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Chromium:
    """One browser with one page; a context manager, after which nothing of it is left.

    Attributes:
        console: What the page has said, and its uncaught errors, one line each.
    """

    def __init__(self, program: str, *, width: int = 1440, height: int = 1000, scheme: str = "dark") -> None:
        self._program = program
        self._size = width, height
        self._scheme = scheme
        self._next_id = 0
        self._received = b""
        self._session: str | None = None
        self.console: list[str] = []

    def __enter__(self) -> Self:
        self._profile = tempfile.mkdtemp(prefix="chromium")
        their_input, self._output = _pipe()
        self._input, their_output = _pipe()
        # The protocol's descriptors are 3 and 4 in the browser.
        command = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", command, str(their_input), str(their_output), "--", self._program),
                *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--no-proxy-server"),
                *("--disable-dev-shm-usage", f"--user-data-dir={self._profile}", "about:blank"),
            ],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(their_input)
        os.close(their_output)
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.set_size(*self._size)
        self.set_scheme(self._scheme)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._output)  # the browser ends when its input is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._input)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._next_id += 1
        mine = self._next_id
        message = {"id": mine, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._output, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while (answer := self._receive(deadline)).get("id") != mine:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._input], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser is silent\n{self.console}"
            piece = os.read(self._input, 1 << 20)
            assert piece, "the browser has ended"
            self._received += piece
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(f"uncaught: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Runtime.consoleAPICalled":
            self.console.append(f"{params['type']}: {[each.get('value') for each in params['args']]}")
        elif method == "Log.entryAdded":
            self.console.append(
                f"{params['entry']['level']}: {params['entry']['text']} {params['entry'].get('url', '')}"
            )

    def open(self, url: str) -> None:
        """Go to a page."""
        result = self.call("Page.navigate", url=url)
        assert not result.get("errorText"), result
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"not so in time: {expression}\n{self.console}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def type(self, selector: str, text: str) -> None:
        """Type into a field as a person does."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key on what has the focus."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def click(self, selector: str) -> None:
        """Click an element."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def set_scheme(self, scheme: str) -> None:
        """Let the system be ``dark`` or ``light``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def set_size(self, width: int, height: int) -> None:
        """Let the window have another size, in CSS pixels."""
        self._size = width, height
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, scale: float = 1.0) -> None:
        """Write a picture of the page, PNG."""
        width, height = self._size
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip)["data"]))
