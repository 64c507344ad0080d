"""An engine without a model: it follows ``AsyncLLM``'s contract, is deterministic, and fails when told to.

Tokens are bytes: id 0–255 is that byte, 256 begins a sequence and 257 ends one. The answer to a prompt is the alphabet,
rotated by the length of the prompt plus the sample's index, one letter per step.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rustvllm import _core
from rustvllm.config import EngineConfig, ModelConfig, SchedulerConfig
from rustvllm.engine.input_processor import InputProcessor
from rustvllm.engine.request.core_request import EngineCoreRequest
from rustvllm.exceptions import EngineDeadError
from rustvllm.observe.metrics.counters import EngineMetrics
from rustvllm.outputs import CompletionOutput, RequestOutput
from rustvllm.process.health import EngineHealth
from rustvllm.sampling_params import RequestOutputKind, SamplingParams
from rustvllm.tenant import Tenant

BOS, EOS = 256, 257
VOCAB_SIZE = 258
BLOCK_SIZE = 16


class FakeTokenizer:
    """Bytes as tokens."""

    bos_token = "<s>"
    eos_token = "</s>"
    eos_token_id = EOS
    vocab_size = VOCAB_SIZE

    def __init__(self, chat_template: str | None = None, tool_template: str | None = None) -> None:
        self.chat_template, self.tool_template = chat_template, tool_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def encode_ids(self, text: str, add_special_tokens: bool = True) -> _core.TokenIds:
        return _core.TokenIds(self.encode(text, add_special_tokens))

    async def encode_off_loop(self, text: str, add_special_tokens: bool = True) -> _core.TokenIds:
        return await asyncio.to_thread(self.encode_ids, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 and ord(token) < 256 else None

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token) if token < 256 else "<s>" if token == BOS else "</s>" for token in token_ids]


def expected_text(num_prompt_tokens: int, length: int, sample: int = 0, start: int = 0) -> str:
    """What the fake engine answers to a prompt of that many tokens, from letter ``start`` to ``length``."""
    return "".join(chr(ord("a") + (num_prompt_tokens + sample + i) % 26) for i in range(start, length))


class FakeEngine:
    """Behaves as ``AsyncLLM`` does for the server.

    Attributes:
        step_seconds: Time of a step; 0 still yields to the event loop.
        refuse: Raised for every request as soon as it is generated for.
        fail_at: Step of every request that raises ``failure``.
        running: Engine request ids that hold blocks now, with how many.
        aborted: Engine request ids that ended before their time.
        seen: Every request so far, in order.
        sinks: What would take their events.
        call_readings: What would find the call that ends them.
        queries: Every question about the engine so far, in order.
        query_failure: Raised for every question.
        says: What every sample says, a character a step, in place of letters.
    """

    tracer = None

    def __init__(
        self,
        *,
        chat_template: str | None = None,
        max_model_len: int = 256,
        names: tuple[str, ...] = ("fake", "alias/fake"),
        policy: str = "fcfs",
        generation_config: dict[str, Any] | None = None,
        tokenizer: bool = True,
        step_seconds: float = 0.0,
        length: int | None = None,
    ) -> None:
        self.config = EngineConfig(
            model=ModelConfig(
                model="some/fake",
                path=Path("/nowhere"),
                architecture="FakeForCausalLM",
                dtype="float32",
                max_model_len=max_model_len,
                vocab_size=VOCAB_SIZE,
                hidden_size=8,
                num_layers=1,
                num_attention_heads=1,
                num_kv_heads=1,
                head_dim=8,
                served_model_name=names,
                generation_config=generation_config or {},
            ),
            scheduler=SchedulerConfig(scheduling_policy=policy),
        )
        self.tokenizer = FakeTokenizer(chat_template) if tokenizer else None
        self.step_seconds = step_seconds
        self.length = length
        self.refuse: Exception | None = None
        self.fail_at: int | None = None
        self.failure: Exception = EngineDeadError("the fake engine died")
        self.running: dict[str, int] = {}
        self.aborted: list[str] = []
        self.seen: list[EngineCoreRequest] = []
        self.sinks: list[Any] = []
        self.call_readings: list[Any] = []
        self.errored = False
        self.heartbeat_age = self.step_age = 0.0
        self.was_shut_down = False
        self.queries: list[tuple[str, dict[str, Any]]] = []
        self.query_failure: Exception | None = None
        self.says: str | None = None
        self.abort_asked: set[str] = set()
        self.input_processor = InputProcessor(self.config, self.tokenizer)  # type: ignore[arg-type]

    def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError("the fake engine died")

    def health(self) -> list[EngineHealth]:
        death = "the fake engine died" if self.errored else None
        return [EngineHealth(0, death, self.heartbeat_age, self.step_age)]

    def leave_silent_engines(self) -> None:
        """There is one, in this process."""

    def stats(self) -> dict[str, int | float]:
        return {"num_running": len(self.running), "num_blocks_used": sum(self.running.values())}

    async def current_stats(self) -> dict[str, int | float]:
        return self.stats()

    async def metrics(self) -> list[EngineMetrics]:
        return []

    async def query(self, kind: str, payload: bytes = b"", *, rank: int = 0, seconds: float = 2.0) -> bytes:
        self.queries.append((kind, json.loads(payload)))
        if self.query_failure is not None:
            raise self.query_failure
        if kind == "journey":
            return json.dumps({"records": [], "is_finished": False}).encode()
        return json.dumps({"stats": self.stats(), "steps": {"steps": [[len(self.queries)]]}}).encode()

    def shutdown(self) -> None:
        self.was_shut_down = True

    async def abort(self, request_id: str) -> None:
        self.abort_asked.add(request_id)

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        sink: Any = None,  # text that comes in the outputs all the same is as good
        arrival_ns: int | None = None,
        tenant: Tenant | None = None,
        lora_request: object = None,
        ends_after_call: object = None,  # it says all that it has to say
    ) -> "FakeStream":
        self.check_health()
        if self.refuse is not None:
            raise self.refuse
        assert request_id not in self.running, "engine request ids must be unique"
        request = await self.input_processor.process_off_loop(
            prompt, params, priority, arrival_ns=arrival_ns, tenant=tenant
        )
        self.seen.append(request)
        self.sinks.append(sink)
        self.call_readings.append(ends_after_call)
        self.running[request_id] = -(-len(request.prompt_token_ids) // BLOCK_SIZE) * request.params.n
        return FakeStream(self, request_id, request)


class FakeStream:
    """The outputs of one request; ``close`` before the end counts as an abort."""

    def __init__(self, engine: FakeEngine, request_id: str, request: EngineCoreRequest) -> None:
        self.engine = engine
        self.request_id = request_id
        self.request = request
        length = engine.length if engine.says is None else len(engine.says)
        self.length = request.max_tokens if length is None else min(request.max_tokens, length)
        self.prompt_ids = request.prompt_token_ids
        self.step = 0
        self.done = False

    def resume(self) -> None:
        """Nothing was held back."""

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self.done:
            raise StopAsyncIteration
        while True:
            await asyncio.sleep(self.engine.step_seconds)
            self.step += 1
            self.engine.check_health()
            if self.engine.fail_at == self.step:
                raise self.engine.failure
            reason = None
            if self.request_id in self.engine.abort_asked:
                reason = "abort"
            elif self.step >= self.length:
                reason = "length" if self.length == self.request.max_tokens else "stop"
            self.done = reason is not None
            if self.done:
                del self.engine.running[self.request_id]
            if self.done or self.request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                return self._output(reason)

    def close(self) -> None:
        self.done = True
        if self.engine.running.pop(self.request_id, None) is not None:
            self.engine.aborted.append(self.request_id)

    def _output(self, reason: str | None) -> RequestOutput:
        ids, params = self.request.prompt_token_ids, self.request.params
        length = min(self.step, self.length)
        outputs = []
        start = max(length - 1, 0) if params.output_kind is RequestOutputKind.DELTA else 0
        for sample in range(params.n):
            said = self.engine.says
            text = expected_text(len(ids), length, sample, start) if said is None else said[start:length]
            outputs.append(
                CompletionOutput(index=sample, text=text, token_ids=list(text.encode()), finish_reason=reason)
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.prompt,
            prompt_ids=ids,
            outputs=outputs,
            finished=reason is not None,
            num_cached_tokens=len(ids) // BLOCK_SIZE * BLOCK_SIZE,
        )
