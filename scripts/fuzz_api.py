"""Sends thousands of requests made from an OpenAPI document to a running server, and reports what it must not answer.

    .venv/clients/schemas/bin/python scripts/fuzz_api.py --url http://127.0.0.1:8000 --cases 5000
    .venv/clients/schemas/bin/python scripts/fuzz_api.py --url ... --document ../shared/data/openai-openapi/openapi.yaml

The environment is made by `scripts/client_environments.sh`. The document is the server's own unless one is named. Half
of the cases keep to the document, half break it. A finding is an answer of 500 or more (501 for what is not built
excepted), one that does not come within a minute, one that is not JSON or a well-framed stream, an error without the
fields every error has, one that is not what the server's own document says, and a server that is not well or not idle
afterwards. The same seed sends the same requests.
Exit status 1: something was found.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from openai_document import load_openai_document
from response_schemas import ResponseSchemas
from schemathesis.generation import GenerationMode

TIMEOUT_SECONDS = 60
MAX_TOKENS = 8
IDLE_SECONDS = 30
NOT_IMPLEMENTED = 501
UNDESCRIBED = (404, 405)
"""Statuses that an answer may have before any operation of the document is reached."""
SHOWN_CHARACTERS = 2000
DONE = b"data: [DONE]"
ANTHROPIC = "/v1/messages"
"""Below it errors have Anthropic's shape."""
NAMED_EVENTS = frozenset({ANTHROPIC, "/v1/responses", "/responses"})
"""Paths whose streams have events with names and no ``[DONE]``."""
Case = Any
"""A request of schemathesis; its class is not public."""

NEEDED = frozenset({"model", "prompt", "messages", "input", "stream"})
NUMBERED = "/responses"
"""What the path of numbered events ends with, each of which has its type in front, and which no [DONE] ends."""
ROLES = ("user", "assistant", "system")
SCHEMAS: tuple[Any, ...] = (
    True,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["x", 1, None]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    {"not": {"type": "string"}},
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[1]}}
NAMED = {"type": "function", "function": {"name": "f"}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
IMAGE_URLS = (f"data:image/png;base64,{PIXEL}", "data:image/png;base64,QUJD", "https://example.com/a.png", "")
SENSIBLE: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda choice: choice.randint(1, 4),
    "best_of": lambda choice: choice.choice([None, 4]),
    "temperature": lambda choice: choice.uniform(0, 2),
    "top_p": lambda choice: choice.uniform(0.01, 1),
    "top_k": lambda choice: choice.randint(-1, 50),
    "min_p": lambda choice: choice.random(),
    "top_n_sigma": lambda choice: choice.uniform(-1, 4),
    "presence_penalty": lambda choice: choice.uniform(-2, 2),
    "frequency_penalty": lambda choice: choice.uniform(-2, 2),
    "repetition_penalty": lambda choice: choice.uniform(0.1, 2),
    "seed": lambda choice: choice.randint(-5, 2**40),
    "min_tokens": lambda choice: choice.randint(0, 2),
    "stream_interval": lambda choice: choice.choice([None, 1, 2, 7]),
    "stop": lambda choice: choice.choice(["a", [" the", "!"], [], None]),
    "stop_token_ids": lambda choice: [choice.randrange(2000) for _ in range(choice.randrange(4))],
    "logit_bias": lambda choice: {str(choice.randrange(2000)): choice.uniform(-200, 200) for _ in range(3)},
    "allowed_token_ids": lambda choice: [choice.randrange(2000) for _ in range(choice.randrange(1, 9))],
    "bad_words": lambda choice: choice.choice([[], ["a"], ["once upon", "he"]]),
    "vllm_xargs": lambda choice: choice.choice([{}, {"a": 1}, {"b": ["x", True]}]),
    "truncate_prompt_tokens": lambda choice: choice.choice([-1, 1, 20]),
    "prompt_logprobs": lambda choice: choice.choice([None, 0, 3]),
    "top_logprobs": lambda choice: choice.randrange(6),
    "logprobs": lambda choice: choice.choice([None, True, 0, 1, 5]),
    "priority": lambda choice: choice.choice([None, 0]),
    "stream_options": lambda choice: choice.choice([None, {"include_usage": True, "continuous_usage_stats": True}]),
    "cache_salt": lambda choice: choice.choice([None, "salt"]),
    "suffix": lambda _: None,
    "tools": lambda choice: choice.choice([None, [TOOL], [{**TOOL, "function": {**TOOL["function"], "strict": True}}]]),
    "tool_choice": lambda choice: choice.choice([None, "none", "auto", "required", NAMED]),
    "parallel_tool_calls": lambda choice: choice.choice([None, True, False]),
    "response_format": lambda choice: choice.choice(
        [
            *[None] * 3,
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": choice.choice(SCHEMAS), "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": choice.choice(SCHEMAS)}},
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": choice.choice(SCHEMAS)}},
        ]
    ),
    "structured_outputs": lambda choice: choice.choice(
        [
            *[None] * 5,
            {"json": choice.choice(SCHEMAS), "disable_any_whitespace": True},
            {"regex": choice.choice(["[a-c]{3}", "(a|b)+", "\\d{1,4}x?"])},
            {"choice": ["yes", "no"]},
            {"grammar": 'root ::= "a" root | "b"'},
            {"grammar": 'start: "a" start | "b"'},
            {"json_object": True},
        ]
    ),
    "thinking_token_budget": lambda choice: choice.choice([None, -1, 0, 5]),
    "reasoning_effort": lambda choice: choice.choice([None, "none", "low"]),
    "modalities": lambda choice: choice.choice([None, ["text"]]),
    "input": lambda choice: choice.choice(
        [
            "Once",
            [{"role": "user", "content": "Once"}],
            [{"type": "message", "role": "assistant", "content": "a"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": choice.choice(IMAGE_URLS)}]}],
            [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}],
        ]
    ),
    "include": lambda choice: choice.choice([None, ["message.output_text.logprobs"]]),
    "text": lambda choice: choice.choice([None, {"format": {"type": "json_object"}}, {"verbosity": "low"}]),
    "prompt": lambda choice: choice.choice(
        ["Once", ["a", "b"], [1, 2, 3], [[5], [6, 7]], " " * 90, "\u00e9\U0001f600"]
    ),
    "tokens": lambda choice: [choice.randrange(2048) for _ in range(choice.randrange(30))],
}
"""Values that are served, for fields that would rarely get one by chance."""
BLOCK = {"type": "text", "text": "Once"}
IMAGES: tuple[Any, ...] = (
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
    {"type": "image", "source": {"type": "url", "url": IMAGE_URLS[0]}},
    {"type": "image", "source": {"type": "file", "file_id": "a"}},
    {"type": "image"},
)
"""Blocks of Anthropic's API, of which a model that sees takes the first two."""
SENSIBLE_MESSAGES: dict[str, Callable[[random.Random], Any]] = {
    **SENSIBLE,
    "system": lambda choice: choice.choice([None, "Be brief.", [BLOCK], [BLOCK, BLOCK]]),
    "tools": lambda choice: choice.choice([None, [{"name": "f", "input_schema": SCHEMAS[1]}], [{"name": "f"}]]),
    "tool_choice": lambda choice: choice.choice(
        [None, *({"type": kind, "name": "f"} for kind in ("auto", "any", "tool", "none"))]
    ),
    "thinking": lambda choice: choice.choice(
        [None, {"type": "enabled", "budget_tokens": 5}, {"type": "adaptive"}, {"type": "disabled"}]
    ),
    "output_config": lambda choice: choice.choice(
        [None, {"effort": "low"}, {"format": {"type": "json_schema", "schema": choice.choice(SCHEMAS)}}]
    ),
    "metadata": lambda choice: choice.choice([None, {"user_id": "ann"}]),
    "stop_sequences": lambda choice: choice.choice([None, ["a"], [" the", "!"]]),
}
"""The same for Anthropic's API."""


class Findings:
    """What was answered, and what should not have been.

    Args:
        schemas: What answers must look like; None checks no shape.

    Attributes:
        statuses: How often each operation answered with each status.
        found: One example of each kind of finding.
    """

    def __init__(self, schemas: ResponseSchemas | None = None) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.found: dict[tuple[str, str], str] = {}
        self._schemas = schemas

    def add(self, operation: str, what: str, example: str) -> None:
        """Note a finding; only the first of its kind is kept."""
        self.found.setdefault((operation, what), example[:SHOWN_CHARACTERS])

    def look_at(self, operation: Any, request: str, response: requests.Response) -> None:
        """Check the answer to a request of one of schemathesis' operations."""
        status = response.status_code
        self.statuses[operation.label, status] += 1
        if status >= 500 and status != NOT_IMPLEMENTED:
            self.add(operation.label, f"status {status}", f"{request}\n    {response.text}")
        elif wrong := what_is_wrong(response, operation.path) or self._what_breaks_its_schema(operation, response):
            self.add(operation.label, wrong, f"{request}\n    {status} {response.headers} {response.text}")

    def _what_breaks_its_schema(self, operation: Any, response: requests.Response) -> str | None:
        if self._schemas is None or response.status_code in UNDESCRIBED:
            return None
        kind = media_type(response)
        if kind == "text/event-stream":
            bodies = [json.loads(data) for _, data in events_of(response.content)]
        elif kind == "application/json":
            bodies = [json.loads(response.content)] if response.content else []
        else:
            bodies = [response.text]
        for body in bodies:
            for place, message in self._schemas.violations(
                operation.path, operation.method, response.status_code, kind, body
            ):
                return f"not what the document says: {place} {message[:200]}"
        return None


def media_type(response: requests.Response) -> str:
    """Of the answer, without parameters."""
    return response.headers.get("content-type", "").partition(";")[0]


def events_of(content: bytes) -> Iterator[tuple[bytes | None, bytes]]:
    """The name, if it has one, and the data of each event of a stream but ``[DONE]``; comments are left out."""
    for frame in content.split(b"\n\n"):
        *before, last = frame.split(b"\n")
        if frame and not frame.startswith(b":") and frame != DONE:
            yield before[0].removeprefix(b"event: ") if before else None, last.removeprefix(b"data: ")


def what_is_wrong(response: requests.Response, path: str) -> str | None:
    """What an answer's form lacks; None when it is one of the forms that clients of the path read."""
    kind = media_type(response)
    if response.status_code == 200 and kind == "text/event-stream":
        return what_is_wrong_with_events(response.content, is_named=path in NAMED_EVENTS)
    if response.status_code == 200 and not response.content:
        return None
    if kind != "application/json":
        return None if response.status_code == 200 else f"an error of content type {kind!r}"
    try:
        body = json.loads(response.content, parse_constant=refuse_constant)
    except ValueError as exc:
        return f"not JSON: {exc}"
    if response.status_code == 200:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if path.startswith(ANTHROPIC):
        is_right = isinstance(error, dict) and set(error) == {"type", "message"} and body["type"] == "error"
        return None if is_right and error["message"] else "an error of another form"
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return "an error of another form"
    if not error["message"] or error["code"] != response.status_code or len(error["message"]) > SHOWN_CHARACTERS:
        return "an error whose fields are wrong"
    return None


def what_is_wrong_with_events(content: bytes, *, is_named: bool) -> str | None:
    """What is wrong with the body of a stream, whose events may have names."""
    *frames, rest = content.split(b"\n\n")
    if rest or (not is_named and frames[-1:] != [DONE]):
        return "a stream that does not end with [DONE]"
    form = re.compile(rb"event: ([a-z_.]+)\ndata: .+" if is_named else rb"data: .+")
    if any(not frame.startswith(b":") and not form.fullmatch(frame) for frame in frames):
        return "a frame that is not an event"
    for name, data in events_of(content):
        try:
            event = json.loads(data, parse_constant=refuse_constant)
        except ValueError as exc:
            return f"an event that is not JSON: {exc}"
        if is_named and event.get("type", "").encode() != name:
            return "an event of another name than its type"
        if event.get("error") is not None or event.get("type") in ("error", "response.failed"):
            return "an error in a stream that had begun"
    return None


def refuse_constant(name: str) -> None:
    """JSON has no NaN and no Infinity."""
    raise ValueError(f"{name} is not JSON")


def steer(case: Case, model: str, choice: random.Random) -> None:
    """Mend some of a request, so that more of them come further than the first of twenty random fields."""
    body = case.body
    if not isinstance(body, dict):
        return
    if choice.random() < 0.9 and "model" in body:
        body["model"] = model
    if choice.random() < 0.7:
        share = choice.random()
        body = {name: value for name, value in body.items() if name in NEEDED or choice.random() < share}
    sensible = SENSIBLE_MESSAGES if case.operation.path.startswith(ANTHROPIC) else SENSIBLE
    for name in body:
        if name in sensible and choice.random() < 0.9:
            body[name] = sensible[name](choice)
    if choice.random() < 0.9:
        length = "max_output_tokens" if case.formatted_path.endswith(NUMBERED) else "max_tokens"
        body[length] = choice.randint(1, MAX_TOKENS)
        body.pop("max_completion_tokens", None)
    if choice.random() < 0.9 and isinstance(body.get("messages"), list):
        body["messages"] = [mended(message, choice) for message in body["messages"] or [{}]]
        if sensible is SENSIBLE_MESSAGES and choice.random() < 0.2:
            image = choice.choice(IMAGES)
            result = {"type": "tool_result", "tool_use_id": "a", "content": [BLOCK, image]}
            body["messages"].append({"role": "user", "content": [choice.choice([image, result]), BLOCK]})
    case.body = body


def mended(message: Any, choice: random.Random) -> Any:
    """A message with a role that there is, most of the time, and often with a text."""
    if not isinstance(message, dict):
        return message
    message = {**message, "role": choice.choice(ROLES)}
    if choice.random() < 0.5 or not message.get("content"):
        message["content"] = "Once upon a time"
    if choice.random() < 0.8:
        message.pop("tool_calls", None)
    return message


def sender(
    operation: Any, base_url: str, model: str, choice: random.Random, findings: Findings
) -> Callable[[Case], None]:
    """A function that sends a request and looks at the answer."""
    session = requests.Session()

    def send(case: Case) -> None:
        if choice.random() < 0.8:
            steer(case, model, choice)
        shown = f"{case.method} {case.formatted_path} {case.query} {case.headers} {case.body!r}"
        try:
            # case.call would read twenty events of a stream and no more.
            asked = case.as_transport_kwargs(base_url=base_url)
            response = session.request(**asked, timeout=TIMEOUT_SECONDS, allow_redirects=False)
        except requests.exceptions.InvalidHeader:
            return  # the client itself does not send this
        except requests.RequestException as exc:
            findings.add(operation.label, f"no answer: {type(exc).__name__}", f"{shown}\n    {exc}")
            return
        findings.look_at(operation, shown, response)

    return send


def fuzz(schema: Any, base_url: str, model: str, cases: int, seed: int, findings: Findings) -> int:
    """Send about ``cases`` requests; operations that generate or tokenise get ten times as many as the others.

    Returns:
        How many were sent.
    """
    operations = [result.ok() for result in schema.get_all_operations()]
    shares = [10 if operation.body and "{" not in operation.path else 1 for operation in operations]
    for operation, share in zip(operations, shares, strict=True):
        number = max(1, cases * share // sum(shares) // 2)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            choice = random.Random(f"{seed} {operation.label} {mode}")
            send = sender(operation, base_url, model, choice, findings)
            try:
                given(send, operation.as_strategy(generation_mode=mode), number, seed)
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing about this operation can be broken
    return sum(findings.statuses.values())


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
    started = time.monotonic()
    if arguments.document:
        # How our answers differ from what OpenAI says is the business of openai_differences.py.
        document, base_url, findings = load_openai_document(arguments.document), f"{url}/v1", Findings()
    else:
        document, base_url = requests.get(f"{url}/openapi.json", timeout=TIMEOUT_SECONDS).json(), url
        findings = Findings(ResponseSchemas(document))
    schema = schemathesis.openapi.from_dict(document)
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
