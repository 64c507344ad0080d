""":class:`ApiClient`: what ``rustvllm chat`` and ``rustvllm complete`` know of a server: its address, model and key."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from typing import Any

from rustvllm.exceptions import RustVLLMError

DEFAULT_URL = "http://127.0.0.1:8000/v1"
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""A server that streams says something, a comment at least, much sooner."""
KEY_VARIABLES = ("RUSTVLLM_API_KEY", "OPENAI_API_KEY")
MAX_LINE_BYTES = 16 << 20


class ApiError(RustVLLMError):
    """The server cannot be reached, or answered with an error; the message is for people."""


class ApiClient:
    """A client of an OpenAI-compatible server that streams answers.

    Args:
        url: Base URL; ``/v1`` is added if it is missing.
        api_key: Sent with every request; None sends none.
        model: Name of the model; None takes the server's first.

    Raises:
        ApiError: The URL is of another kind, or the key has characters that no header carries.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ApiError(f"--url must begin with http:// or https://, got {url!r}")
        self._url = url.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = _bearer(api_key)
        self._model = model

    @property
    def model(self) -> str:
        """Name of the model; asks the server for it if none was given.

        Raises:
            ApiError: It cannot be asked, or serves none.
        """
        if self._model is None:
            with self._open("/models", None, CONNECT_SECONDS) as response:
                try:
                    self._model = str(json.load(response)["data"][0]["id"])
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    raise ApiError(f"{self._url}/models lists no model; name one with --model-name") from error
        return self._model

    def context_len(self) -> int | None:
        """The ``max_model_len`` that ``/v1/models`` gives for the model, in tokens; None if the server does not say."""
        try:
            with self._open("/models", None, CONNECT_SECONDS) as response:
                entries = json.loads(response.read(MAX_LINE_BYTES))["data"]
            found = next(entry for entry in entries if entry["id"] == self.model)["max_model_len"]
        except (ApiError, OSError, http.client.HTTPException, ValueError, KeyError, TypeError, StopIteration):
            return None
        return found if isinstance(found, int) and found > 0 else None

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed answer; leaving the iterator early closes the connection, which ends the request.

        Raises:
            ApiError: The server cannot be reached, refuses, or breaks off.
        """
        request = {"model": self.model, "stream": True, **body}
        with self._open(path, json.dumps(request).encode(), SILENCE_SECONDS) as response:
            try:
                while line := response.readline(MAX_LINE_BYTES):
                    data = line.strip()
                    if not data.startswith(b"data:"):
                        continue  # a blank line, or a comment that keeps the connection alive
                    data = data.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if not isinstance(event, dict):
                        raise ApiError(f"the server sent an event that is not a JSON object: {data[:80]!r}")
                    if event.get("error"):
                        raise ApiError(_message(event["error"]))
                    yield event
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ApiError(f"the answer broke off: {error}") from error
        raise ApiError("the answer broke off: the server closed the connection before [DONE]")

    def _open(self, path: str, data: bytes | None, timeout: float) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)  # noqa: S310 -- checked above
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(f"{self._url}{path}: {error.code} {_body_message(error)}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ApiError(f"cannot reach {self._url}: {reason}; is the server running, and is --url right?") from error
        return response


def choices_of(event: Mapping[str, Any]) -> list[Any]:
    """The choices of an event; none of one that has only ``usage``, for which some servers write null.

    Raises:
        ApiError: They are not a list of objects.
    """
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ApiError(f"the server sent an event whose choices are not a list of objects: {choices!r:.80}")
    return choices


def _bearer(api_key: str) -> str:
    """The header's value: the key in UTF-8, whose bytes :mod:`http.client` takes as characters."""
    wrong = next((at for at, sign in enumerate(api_key) if sign == " " or not sign.isprintable()), None)
    if wrong is not None:
        raise ApiError(
            f"the API key has a space or a control character at position {wrong} of {len(api_key)}, from 0; no HTTP "
            "header carries it (a line end of a file, perhaps)"
        )
    return f"Bearer {api_key}".encode().decode("latin-1")


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which server and model."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"base URL of the server, with or without /v1 (default: {DEFAULT_URL})"
    )
    parser.add_argument("--model-name", metavar="NAME", help="model to use (default: the server's first)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key of the server (default: {' or '.join(KEY_VARIABLES)} from the environment, where ps does not "
        "show it)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: the server's)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: the server's)"
    )


def make_client(args: argparse.Namespace) -> ApiClient:
    """The client that the flags describe."""
    key = args.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return ApiClient(args.url, key, args.model_name)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a request that the flags set."""
    return {name: value for name in ("max_tokens", "temperature") if (value := getattr(args, name)) is not None}


def _body_message(error: urllib.error.HTTPError) -> str:
    try:
        return _message(json.loads(error.read(MAX_LINE_BYTES))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
