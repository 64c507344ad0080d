"""Batch files at a URL: fetched with GET, stored with PUT.

A URL may hold a signature, so no message shows all of it.
"""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from rustvllm.exceptions import RustVLLMError
from rustvllm.process.private_file import open_private

SILENCE_SECONDS = 60.0
MAX_DOWNLOAD_BYTES = 16 << 30
UPLOAD_PAUSES = (1.0, 4.0)
"""Seconds before another attempt; one more attempt than pauses."""
_COPY_BYTES = 1 << 20


class RemoteFileError(RustVLLMError):
    """A file cannot be fetched or stored."""


def is_url(name: str) -> bool:
    """Whether ``name`` is a URL rather than a path."""
    return name.lower().startswith(("http://", "https://"))


def shown(url: str) -> str:
    """``url`` without user, password and query, which may be secrets."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def download(url: str, target: Path, max_bytes: int = MAX_DOWNLOAD_BYTES) -> None:
    """Fetch ``url`` into a file.

    Raises:
        RemoteFileError: It cannot be fetched, breaks off, or has more than ``max_bytes``.
    """
    received = 0
    try:
        with (
            urllib.request.urlopen(url, timeout=SILENCE_SECONDS) as response,  # noqa: S310 -- is_url
            open(target, "wb", opener=open_private) as file,
        ):
            announced = response.headers.get("Content-Length")
            while piece := response.read(_COPY_BYTES):
                received += len(piece)
                if received > max_bytes:
                    raise RemoteFileError(f"{shown(url)} has more than {max_bytes} bytes; download it to a file first")
                file.write(piece)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise RemoteFileError(f"cannot fetch {shown(url)}: {_reason(exc)}") from None
    if announced is not None and announced.isdigit() and int(announced) != received:
        raise RemoteFileError(f"cannot fetch {shown(url)}: the connection ended after {received} of {announced} bytes")


def upload(source: Path, url: str, pauses: tuple[float, ...] = UPLOAD_PAUSES) -> None:
    """Store a file at ``url``, in as many attempts as it takes within reason.

    Raises:
        RemoteFileError: It cannot be stored.
    """
    for pause in (*pauses, None):
        try:
            _put(source, url)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            refused = isinstance(exc, urllib.error.HTTPError) and exc.code < 500  # trying again changes nothing
            if pause is None or refused:
                raise RemoteFileError(f"cannot store the answers at {shown(url)}: {_reason(exc)}") from None
            time.sleep(pause)
        else:
            return


def _put(source: Path, url: str) -> None:
    with source.open("rb") as file:
        headers = {"Content-Type": "application/jsonl", "Content-Length": str(source.stat().st_size)}
        request = urllib.request.Request(url, data=file, headers=headers, method="PUT")  # noqa: S310 -- is_url
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS):  # noqa: S310
            pass


def _reason(exc: BaseException) -> str:
    if isinstance(exc, urllib.error.HTTPError):
        return f"{exc.code} {exc.reason}"
    return str(getattr(exc, "reason", exc)) or type(exc).__name__
