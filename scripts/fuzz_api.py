"""Sends thousands of requests made from an OpenAPI document to a running server, and reports what it must not answer.

    .venv/clients/schemas/bin/python scripts/fuzz_api.py --url http://127.0.0.1:8000 --cases 5000
    .venv/clients/schemas/bin/python scripts/fuzz_api.py --url ... --document ../shared/data/openai-openapi/openapi.yaml

The environment is made by `scripts/client_environments.sh`. The document is the server's own unless one is named. Half
of the cases keep to the document, half break it. A finding is an answer of 500 or more (501 for what is not built
excepted), one that does not come within a minute, one that is not JSON or a well-framed stream, an error without the
fields every error has, and a server that is not well or not idle afterwards. The same seed sends the same requests.
Exit status 1: something was found.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from openai_document import load_openai_document
from schemathesis import Response
from schemathesis.generation import GenerationMode

TIMEOUT_SECONDS = 60
MAX_TOKENS = 8
IDLE_SECONDS = 30
NOT_IMPLEMENTED = 501
SHOWN_CHARACTERS = 2000
Case = Any
"""A request of schemathesis; its class is not public."""


class Findings:
    """What was answered, and what should not have been.

    Attributes:
        statuses: How often each operation answered with each status.
        found: One example of each kind of finding.
    """

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.found: dict[tuple[str, str], str] = {}

    def add(self, operation: str, what: str, example: str) -> None:
        """Note a finding; only the first of its kind is kept."""
        self.found.setdefault((operation, what), example[:SHOWN_CHARACTERS])

    def look_at(self, operation: str, request: str, response: Response) -> None:
        """Check an answer."""
        status = response.status_code
        self.statuses[operation, status] += 1
        if status >= 500 and status != NOT_IMPLEMENTED:
            self.add(operation, f"status {status}", f"{request}\n    {response.text}")
        elif wrong := what_is_wrong(response):
            self.add(operation, wrong, f"{request}\n    {status} {response.headers} {response.text}")


def what_is_wrong(response: Response) -> str | None:
    """What an answer's form lacks; None when it is one of the forms that clients read."""
    media_type = "".join(response.headers.get("content-type", [])).partition(";")[0]
    if response.status_code == 200 and media_type == "text/event-stream":
        return what_is_wrong_with_events(response.content)
    if response.status_code == 200 and not response.content:
        return None
    if media_type != "application/json" and response.status_code != 200:
        return f"an error of content type {media_type!r}"
    if media_type != "application/json":
        return None
    try:
        body = json.loads(response.content, parse_constant=refuse_constant)
    except ValueError as exc:
        return f"not JSON: {exc}"
    if response.status_code == 200:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return "an error of another form"
    if not error["message"] or error["code"] != response.status_code or len(error["message"]) > SHOWN_CHARACTERS:
        return "an error whose fields are wrong"
    return None


def what_is_wrong_with_events(content: bytes) -> str | None:
    """What is wrong with the body of a stream."""
    *frames, done, rest = content.split(b"\n\n")
    if rest or done != b"data: [DONE]":
        return "a stream that does not end with [DONE]"
    for frame in frames:
        if frame.startswith(b":"):
            continue  # a comment
        if not frame.startswith(b"data: ") or b"\n" in frame:
            return "a frame that is no event"
        try:
            event = json.loads(frame[6:], parse_constant=refuse_constant)
        except ValueError as exc:
            return f"an event that is not JSON: {exc}"
        if "error" in event:
            return "an error in a stream that had begun"
    return None


def refuse_constant(name: str) -> None:
    """JSON has no NaN and no Infinity."""
    raise ValueError(f"{name} is no JSON")


def steer(case: Case, model: str, choice: random.Random) -> None:
    """Change some of a request so that more of them come further than its first wrong field.

    Without this nearly all end at a model that does not exist, or at the first of twenty random fields.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    if choice.random() < 0.9 and "model" in body:
        body["model"] = model
    if choice.random() < 0.6:
        kept = {"model", "prompt", "messages", "stream"}
        body = {name: value for name, value in body.items() if name in kept or choice.random() < 0.3}
    if choice.random() < 0.9:
        body["max_tokens"] = choice.randint(1, MAX_TOKENS)
        body.pop("max_completion_tokens", None)
    if isinstance(body.get("n"), int) and choice.random() < 0.9:
        body["n"] = choice.randint(1, 4)
    case.body = body


def fuzz(schema: Any, base_url: str, model: str, cases: int, seed: int, findings: Findings) -> int:
    """Send about ``cases`` requests; operations that take a body get ten times as many as the others.

    Returns:
        How many were sent.
    """
    operations = [result.ok() for result in schema.get_all_operations()]
    shares = [10 if operation.body else 1 for operation in operations]
    before = sum(findings.statuses.values())
    for operation, share in zip(operations, shares, strict=True):
        number = max(1, cases * share // sum(shares) // 2)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            choice = random.Random(f"{seed} {operation.label} {mode}")

            def send(case: Case, label: str = operation.label, choice: random.Random = choice) -> None:
                if choice.random() < 0.8:
                    steer(case, model, choice)
                shown = f"{case.method} {case.formatted_path} {case.query} {case.headers} {case.body!r}"
                try:
                    response = case.call(base_url=base_url, timeout=TIMEOUT_SECONDS)
                except requests.exceptions.InvalidHeader:
                    return  # the client itself does not send this
                except requests.RequestException as exc:
                    findings.add(label, f"no answer: {type(exc).__name__}", f"{shown}\n    {exc}")
                    return
                findings.look_at(label, shown, response)

            try:
                given(send, operation.as_strategy(generation_mode=mode), number, seed)
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing about this operation can be broken
    return sum(findings.statuses.values()) - before


def given(send: Callable[[Case], None], cases: Any, number: int, seed: int) -> None:
    """Call ``send`` with ``number`` cases, the same for the same seed."""
    hypothesis.seed(seed)(
        hypothesis.settings(
            max_examples=number,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )(hypothesis.given(case=cases)(send))
    )()


def check_afterwards(url: str, model: str, findings: Findings) -> None:
    """The server is well, idle, and answers as ever."""
    health = requests.get(f"{url}/health", timeout=TIMEOUT_SECONDS)
    if health.status_code != 200:
        findings.add("afterwards", "not well", health.text)
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    answer = requests.post(f"{url}/v1/completions", json=asked, timeout=TIMEOUT_SECONDS)
    if answer.status_code != 200 or not answer.json()["choices"][0]["text"]:
        findings.add("afterwards", "no completion", answer.text)
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        load = requests.get(f"{url}/load", timeout=TIMEOUT_SECONDS).json()
        if load["num_running"] == load["num_waiting"] == 0:
            return
        if time.monotonic() > deadline:
            findings.add("afterwards", "requests left", json.dumps(load))
            return
        time.sleep(0.1)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a running server, without /v1")
    parser.add_argument("--document", type=Path, help="OpenAI's document (default: the server's own /openapi.json)")
    parser.add_argument("--cases", type=int, default=5000, help="about how many requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which requests (default: %(default)s)")
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/")
    model = requests.get(f"{url}/v1/models", timeout=TIMEOUT_SECONDS).json()["data"][0]["id"]
    findings = Findings()
    started = time.monotonic()
    if arguments.document:
        schema, base_url = schemathesis.openapi.from_dict(load_openai_document(arguments.document)), f"{url}/v1"
    else:
        served = requests.get(f"{url}/openapi.json", timeout=TIMEOUT_SECONDS)
        schema, base_url = schemathesis.openapi.from_dict(served.json()), url
    sent = fuzz(schema, base_url, model, arguments.cases, arguments.seed, findings)
    check_afterwards(url, model, findings)
    for (operation, status), count in sorted(findings.statuses.items()):
        print(f"{count:7} × {status}  {operation}")
    for (operation, what), example in findings.found.items():
        print(f"\nFOUND {operation}: {what}\n    {example}")
    print(f"\n{sent} requests in {time.monotonic() - started:.0f} s, {len(findings.found)} findings")
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())
