""":class:`NaiveResponseEvents`: the events of a streamed response, as Python makes them, to compare with the core.

It makes the steps of the answer with :class:`ItemReader`, as a whole answer does, and renders each as its events.
"""

import json
from typing import Any

from rustvllm.outputs import CompletionOutput
from rustvllm.server.answers.response_items import Item, ItemReader, Step
from rustvllm.server.answers.response_object import ResponseFrame, error_code, failed, outcome_of
from rustvllm.server.answers.turn import whole_characters
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.errors import describe

_NAMES = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class NaiveResponseEvents:
    """See the module.

    Attributes:
        events: What has been made so far.
    """

    def __init__(self, frame: ResponseFrame, items: ItemReader, usage: UsageCounter) -> None:
        self.events: list[bytes] = []
        self._frame, self._items, self._usage = frame, items, usage
        self._finished: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._open: Item | None = None

    def begin(self) -> None:
        """The events that a response begins with."""
        for kind in ("response.created", "response.in_progress"):
            self._add(kind, response=json.loads(b"".join(self._frame.in_progress())))

    def text(self, completion: CompletionOutput) -> None:
        """The events of more of the answer."""
        self._render(self._items.read(completion))

    def finish(self, completion: CompletionOutput) -> None:
        """The events of the end."""
        outcome = outcome_of(completion.finish_reason)
        self._render(self._items.read(completion))
        self._render(self._items.finish(is_whole=outcome.status == "completed"))
        output = json.dumps(self._finished).encode()
        state = self._frame.ended(outcome, [output], self._usage)
        self._add(f"response.{outcome.status}", response=json.loads(b"".join(state)))

    def error(self, exc: BaseException) -> None:
        """The events of an error that ends the stream."""
        status, message, param, _ = describe(exc)
        if not self.events:
            self._add("error", code=error_code(status), message=message, param=param)
            return
        if self._open is not None:
            if self._open.kind == "custom_tool_call":
                text = naive_custom_input("".join(self._items._custom_arguments))
                if text:
                    self._more(Step(self._open, "more", text))
            self._close(is_whole=False)
        output = json.dumps(self._finished).encode()
        state = self._frame.ended(failed(status, message), [output], None)
        self._add("response.failed", response=json.loads(b"".join(state)))

    def _render(self, steps: list[Step]) -> None:
        for step in steps:
            if step.kind == "open":
                self._begin(step.item)
            elif step.kind == "more":
                self._more(step)
            else:
                self._close(is_whole=step.is_whole)

    def _place(self, item: Item) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        return {**place, "content_index": 0} if item.kind in ("message", "reasoning") else place

    def _begin(self, item: Item) -> None:
        self._open, self._texts, self._logprobs = item, [], []
        new = item.as_dict("in_progress", "", [], is_new=True)
        self._add("response.output_item.added", output_index=item.index, item=new)
        if item.kind in ("message", "reasoning"):
            self._add("response.content_part.added", **self._place(item), part=item.part("", []))

    def _more(self, step: Step) -> None:
        self._texts.append(step.text)
        self._logprobs += step.logprobs
        shown = {"logprobs": list(step.logprobs)} if step.item.kind == "message" else {}
        self._add(f"{_NAMES[step.item.kind][0]}.delta", **self._place(step.item), delta=step.text, **shown)

    def _close(self, *, is_whole: bool) -> None:
        item = self._open
        assert item is not None
        text, logprobs = "".join(self._texts), self._logprobs
        name, said = _NAMES[item.kind]
        more: dict[str, Any] = {"logprobs": logprobs} if item.kind == "message" else {}
        if item.kind == "function_call":
            more["name"] = item.name
        self._add(f"{name}.done", **self._place(item), **{said: text}, **more)
        if item.kind in ("message", "reasoning"):
            self._add("response.content_part.done", **self._place(item), part=item.part(text, logprobs))
        whole = item.as_dict("completed" if is_whole else "incomplete", text, logprobs)
        self._add("response.output_item.done", output_index=item.index, item=whole)
        self._finished.append(whole)
        self._open = None

    def _add(self, kind: str, **members: Any) -> None:
        event = {"type": kind, "sequence_number": len(self.events), **members}
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        self.events.append(f"event: {kind}\ndata: {text}\n\n".encode())


def naive_custom_input(arguments: str) -> str:
    """The input of a custom tool, read by Python's ``json``."""
    for end in ("", '"}', "}"):
        try:
            given = json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        if isinstance(given, dict) and isinstance(given.get("input"), str):
            return whole_characters(given["input"])
    return arguments
