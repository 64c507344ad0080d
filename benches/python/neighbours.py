"""``Neighbours``: measures how an event affects others that use a server: ``/health``, and streams."""

import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from typing import Any, Self

import numpy as np

POLL_SECONDS = 0.01
SETTLE_SECONDS = 1.0
TIMEOUT = 120


class Neighbours:
    """Queries ``/health`` over new connections and reads streams until its context ends; times are in seconds.

    Args:
        url: The server's URL.
        streams: How many streams are read at a time.
    """

    def __init__(self, url: str, streams: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._health: list[float] = []
        self._gaps: list[list[float]] = [[] for _ in range(streams)]
        self._failures = 0
        self._threads = [threading.Thread(target=self._ask)]
        self._threads += [threading.Thread(target=self._read, args=(index,)) for index in range(streams)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        time.sleep(SETTLE_SECONDS)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> dict[str, Any]:
        """The measurements since the last call."""
        with self._lock:
            health, gaps, failures = self._health, self._gaps, self._failures
            self._health, self._gaps, self._failures = [], [[] for _ in gaps], 0
        return {
            "health_ms": milliseconds([health]),
            "health_failures": failures,
            "inter_token_ms": milliseconds(gaps),
        }

    def _ask(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            begin = time.perf_counter()
            connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT)
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
                self._health.append(time.perf_counter() - begin)
            except OSError:
                self._failures += 1
            finally:
                connection.close()

    def _read(self, index: int) -> None:
        """Read one stream after another; a gap is the time from one event with data to the stream's next one."""
        body = json.dumps({"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True})
        while not self._stopping.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer, last = connection.getresponse(), None
                while not self._stopping.is_set() and (line := answer.readline()):
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self._gaps[index].append(now - last)
                        last = now
            connection.close()


def milliseconds(series: list[list[float]]) -> dict[str, float]:
    """Median of all, the highest 99th percentile of any series, and the largest of all; in milliseconds."""
    seen = [np.array(each) * 1000 for each in series if each]
    if not seen:
        return {"count": 0}
    return {
        "p50": round(float(np.median(np.concatenate(seen))), 2),
        "p99": round(max(float(np.percentile(each, 99)) for each in seen), 2),
        "max": round(max(float(each.max()) for each in seen), 2),
        "count": sum(map(len, seen)),
    }
