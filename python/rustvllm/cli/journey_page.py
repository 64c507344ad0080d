"""``JourneyPage``: the records of one request as a page of a terminal, 100 columns wide.

Each step is three lines, its three phases: what was scheduled, how long the model ran, what became of the request.
"""

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from rustvllm.observe.trace.tracer import TraceRecord, format_blocks, format_duration

if TYPE_CHECKING:
    from rustvllm.engine.llm_engine import LLMEngine
    from rustvllm.outputs import RequestOutput

WIDTH: Final = 100
_LABEL: Final = 18
_TIME: Final = 9
_BAR: Final = 24
_BOLD, _DIM, _GREEN, _YELLOW, _RED, _CYAN = "1", "2", "32", "33", "31", "36"
_NO_FACTS: Final = {"arguments": "all at their defaults"}
_COLORS: Final = {"RUNNING": _GREEN, "WAITING": _YELLOW, "PREEMPTED": _RED, "SWAPPED": _RED}


class JourneyPage:
    """Prints what it is shown of one request after the other.

    Args:
        engine: Whose requests; for the sizes and the text of tokens.
        write: Takes a line.
        use_color: Whether the terminal shows colours.
    """

    def __init__(self, engine: "LLMEngine", write: Callable[[str], object], *, use_color: bool) -> None:
        self._engine = engine
        self._write = write
        self._use_color = use_color
        self._request_id = ""
        self._began_ns = 0
        self._status = ""
        self._num_computed = 0
        self._blocks: list[int] = []
        self._step: list[TraceRecord] = []
        self._mine: dict[int, TraceRecord] = {}
        self._tokens: dict[int, list[TraceRecord]] = {}
        self._verified: dict[int, TraceRecord] = {}
        self._steps: dict[int, list[TraceRecord]] = {}
        self._absent: list[int] = []
        self._detokenise_ns: int | None = None
        self._is_answered = False

    # -- the parts ------------------------------------------------------------------------------------------------

    def show_startup(self, records: Sequence[TraceRecord]) -> None:
        """How the engine came to be."""
        config, num_blocks = self._engine.config, self._engine.engine_core.num_blocks
        model, cache, scheduler = config.model, config.cache, config.scheduler
        sizes = f"{num_blocks - 1} KV blocks of {cache.block_size} tokens"
        self._write(self._paint(_BOLD, f"rustvllm trace {model.served_model_name[0]}"))
        self._write(
            f"{config.device.device} {model.dtype}, {sizes}, context {model.max_model_len}, "
            f"{scheduler.max_num_batched_tokens} tokens a step at most"
        )
        self._write("")
        self._rule("start-up")
        loads = [record for record in records if record.layer == "model_load"]
        for record in records:
            if record.layer != "model_load":
                facts = [value if name == record.layer else f"{name} {value}" for name, value in record.extras.items()]
                self._line(
                    _words(record.layer),
                    record.duration_ns,
                    ", ".join(facts) or _NO_FACTS.get(record.layer, record.event),
                )
        if loads:
            parts = ", ".join(f"{record.event} {format_duration(record.duration_ns or 0)}" for record in loads)
            self._line("model load", sum(record.duration_ns or 0 for record in loads), parts)

    def begin(self, request_id: str, prompt: str) -> None:
        """The next request."""
        self._request_id = request_id
        self._status, self._num_computed, self._blocks = "", 0, []
        self._mine, self._tokens, self._verified, self._steps, self._absent = {}, {}, {}, {}, []
        self._began_ns, self._detokenise_ns, self._is_answered = 0, None, False
        self._write("")
        shown = repr(prompt) if len(prompt) <= 70 else f"{prompt[:67]!r}..."
        self._rule(f"{request_id}  {shown}")

    def show(self, record: TraceRecord) -> None:
        """A record, in the order in which it came; of others' requests only the steps matter."""
        if record.request_id == self._request_id:
            self._began_ns = self._began_ns or record.timestamp_ns
            self._show_own(record)
        elif record.request_id is None and record.step is not None:
            self._steps.setdefault(record.step, []).append(record)
            if record.event == "updated":
                self._show_step(record.step)
        elif record.layer == "detokenise":
            self._detokenise_ns = record.duration_ns

    def end(self, output: "RequestOutput") -> None:
        """It has given its last output."""
        self._show_absence()
        [sample], metrics = output.outputs, output.metrics
        self._write("")
        self._line("output", None, repr(sample.text))
        if output.error is not None:
            self._line("error", None, self._paint(_RED, output.error))
        stop = "" if sample.stop_reason is None else f", stop_reason {sample.stop_reason!r}"
        cached = f"{output.num_cached_tokens} of {len(output.prompt_ids)} prompt tokens were cached"
        self._line("", None, f"{len(sample.token_ids)} tokens, finish_reason {sample.finish_reason}{stop}; {cached}")
        if metrics is None:
            return
        times = []
        arrival, first, finished = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
        if metrics.first_scheduled_time is not None:
            times.append(f"queue {format_duration((metrics.first_scheduled_time - arrival) * 1e9)}")
        if first is not None:
            times.append(f"first token after {format_duration((first - arrival) * 1e9)}")
        if first is not None and finished is not None and len(sample.token_ids) > 1:
            each = (finished - first) / (len(sample.token_ids) - 1)
            times.append(f"then {format_duration(each * 1e9)} per token")
        if finished is not None:
            times.append(f"total {format_duration((finished - arrival) * 1e9)}")
        self._line("times", None, ", ".join(times))

    # -- one request ----------------------------------------------------------------------------------------------

    def _show_own(self, record: TraceRecord) -> None:
        match record.layer, record.event:
            case "entry", _:
                self._line("entry", None, f"{record.event}, at 0 µs")
            case "input_processing", _:
                facts = record.extras
                self._line(
                    "input processing",
                    record.duration_ns,
                    f"{_count(facts['num_chars'], 'character')} are {_count(facts['num_prompt_tokens'], 'token')}; "
                    f"max_tokens {facts['max_tokens']}, temperature {facts['temperature']:g}"
                    + (f", adapter {facts['adapter']}" if facts.get("adapter") else ""),
                )
            case "queue", _:
                self._show_absence()
                self._show_queue(record)
            case "schedule", _:
                self._mine[record.step or 0] = record
            case "sample", "verified":
                self._verified[record.step or 0] = record
            case "sample", _:
                self._tokens.setdefault(record.step or 0, []).append(record)
            case "update", _:
                self._show_absence()
                self._status = record.status or ""
                given = f", gives {_count(len(self._blocks), 'block')} back" if self._blocks else ""
                race = f"{record.num_computed_tokens} computed of {record.num_tokens} tokens"
                why = "; the front end had its end already" if self._is_answered else ""
                self._line("  update", None, f"{self._state()}{given}; {race}{why}")
            case "detokenise", _:
                tokens, chars = record.extras["num_new_tokens"], record.extras["num_new_chars"]
                took, self._detokenise_ns = self._detokenise_ns, None
                self._line("  detokenise", took, f"{_count(tokens, 'new token')}, {_count(chars, 'new character')}")
            case "response", _:
                self._is_answered = True
                self._line("  response", None, f"{record.event}, at {self._since(record)}")

    def _show_queue(self, record: TraceRecord) -> None:
        before, self._status = self._status, record.status or ""
        race = f"{record.num_computed_tokens} computed of {record.num_tokens} tokens"
        if record.event == "waiting":
            self._line("queue", None, f"{self._state()}, {race}")
        else:
            taken = _count(len(self._blocks), "block")
            lost = "its KV goes to CPU memory" if record.event == "swapped" else "its KV is lost, its tokens are kept"
            self._write("")
            self._line("queue", None, f"{before} → {self._state()}: its {taken} are needed; {lost} ({race})")
            self._blocks = []
        self._num_computed = record.num_computed_tokens or 0

    def _show_step(self, step: int) -> None:
        records = {record.layer: record for record in self._steps.pop(step, ())}
        mine = self._mine.pop(step, None)
        if mine is None:
            self._absent.append(step)
            return
        self._show_absence()
        planned, ran, sampled, updated = (records.get(name) for name in ("schedule", "execute", "sample", "update"))
        if planned is None or ran is None or sampled is None or updated is None:
            return
        self._write("")
        self._rule(f"step {step}, at {self._since(planned)}")
        self._show_schedule(planned, mine)
        others = planned.extras["num_reqs"] - 1
        company = f", with {_count(others, 'neighbour')}" if others else ""
        of_images = f", images {ran.extras['images_us']:.0f}" if "images_us" in ran.extras else ""
        in_device = f", wait {sampled.extras['wait_us']:.0f}" if sampled.extras["wait_us"] >= 100 else ""
        self._line(
            "  execute",
            (ran.duration_ns or 0) + (sampled.duration_ns or 0),
            f"{_count(planned.extras['num_scheduled_tokens'], 'token')}{company}: prepare "
            f"{ran.extras['prepare_us']:.0f}{of_images}, forward {ran.extras['forward_us']:.0f}, sample "
            f"{sampled.extras['sample_us']:.0f}{in_device} µs",
        )
        if verified := self._verified.pop(step, None):
            facts = verified.extras
            self._line(
                "  drafts",
                None,
                f"{facts['num_draft_tokens']} drafted: {facts['num_accepted_tokens']} accepted, "
                f"{facts['num_rejected_tokens']} rejected",
            )
        tokens = self._tokens.pop(step, [])
        if not tokens:
            self._line("  update", updated.duration_ns, f"{self._race(mine)}  the prompt goes on: no token")
        for token in tokens:
            self._line("  update", updated.duration_ns, f"{self._race(token)}  {self._token(token)}")

    def _show_schedule(self, planned: TraceRecord, mine: TraceRecord) -> None:
        before, self._status = self._status, mine.status or ""
        scheduled, computed = mine.extras["num_scheduled_tokens"], mine.num_computed_tokens or 0
        status = self._state() if before == self._status else f"{before} → {self._state()}"
        new: list[int] = mine.extras.get("new_block_ids", [])
        self._blocks = [*self._blocks[: mine.extras["num_blocks"] - len(new)], *new]
        cached = computed - scheduled - self._num_computed
        # With steps in flight what is rejected or failed counts backwards; nothing was found in the cache then.
        found = f"; {_count(cached, 'token')} cached" if cached > 0 else ""
        self._num_computed = computed
        grown = f", {format_blocks(new)} new" if new and len(new) < len(self._blocks) else ""
        self._line(
            "  schedule",
            planned.duration_ns,
            f"{status}, {_count(scheduled, 'token')} to run{found}; blocks [{format_blocks(self._blocks)}]{grown}",
        )

    def _show_absence(self) -> None:
        """Steps that it was not in, as one line."""
        absent, self._absent = self._absent, []
        if absent:
            name = f"step {absent[0]}" if len(absent) == 1 else f"steps {absent[0]}-{absent[-1]}"
            self._write("")
            self._line(name, None, f"without it: {self._status or 'not here yet'}")

    # -- words ----------------------------------------------------------------------------------------------------

    def _race(self, record: TraceRecord) -> str:
        """``num_computed_tokens`` of ``num_tokens``, as a bar and in numbers."""
        computed, total = record.num_computed_tokens or 0, record.num_tokens or 1
        filled = min(_BAR, _BAR * computed // max(1, total))
        bar = self._paint(_GREEN, "█" * filled) + self._paint(_DIM, "░" * (_BAR - filled))
        return f"{bar} {computed}/{total}"

    def _token(self, record: TraceRecord) -> str:
        token_id: int = record.extras["token_id"]
        tokenizer = self._engine.tokenizer
        text = "" if tokenizer is None else f" {self._paint(_CYAN, repr(tokenizer.decode([token_id], False)))}"
        return f"token {token_id}{text}"

    def _state(self) -> str:
        color = _COLORS.get(self._status, _RED if self._status == "FINISHED_ERROR" else _BOLD)
        return self._paint(color, self._status)

    def _since(self, record: TraceRecord) -> str:
        return format_duration(max(0, record.timestamp_ns - self._began_ns))

    def _rule(self, title: str) -> None:
        line = "─" * max(2, WIDTH - len(title) - 1)
        self._write(f"{self._paint(_BOLD, title)} {self._paint(_DIM, line)}")

    def _line(self, label: str, duration_ns: int | None, text: str) -> None:
        """Label, time and text; what does not fit goes on below, unless it is coloured."""
        took = "" if duration_ns is None else format_duration(duration_ns)
        head = f"{self._paint(_DIM, f'{label:<{_LABEL}}')}{took:>{_TIME}}  "
        indent = _LABEL + _TIME + 2
        lines = [text] if "\x1b" in text else textwrap.wrap(text, WIDTH - indent) or [""]
        self._write((head + lines[0]).rstrip())
        for more in lines[1:]:
            self._write(" " * indent + more)

    def _paint(self, color: str, text: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self._use_color and text else text


def _words(name: str) -> str:
    return name.replace("_", " ")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
