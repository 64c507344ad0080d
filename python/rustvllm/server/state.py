"""What the running server knows: its settings, how far it is, and the model it serves."""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from rustvllm import __version__
from rustvllm.config import TracingConfig
from rustvllm.engine.request.default_params import default_sampling_params
from rustvllm.engine.request.pairs import PairPrompts
from rustvllm.logger import init_logger
from rustvllm.lora.request import LoRARequest
from rustvllm.observe.metrics.prometheus import PrometheusText
from rustvllm.observe.trace.tracer import is_debugging
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.errors import UnavailableError, UnknownModelError
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.request_load import ServerLoad
from rustvllm.text.chat_renderer import ChatRenderer
from rustvllm.text.chat_template import PLAIN_CHAT_TEMPLATE, special_tokens
from rustvllm.text.turn_formats import find_turn_formats

if TYPE_CHECKING:
    from rustvllm.config import EngineConfig, ModelConfig
    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.engine.front_tracer import FrontTracer
    from rustvllm.lora.registry import LoadedAdapter

logger = init_logger(__name__)


class ServerStatus(Enum):
    """How far the server is."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DEAD = "dead"


class ServedModel:
    """The engine with what requests need to know of its model; blocks until its chat template has been looked at.

    Raises:
        InvalidRequestError: The chat template is not valid, or goes over its limits.
        OSError: There is no process to render chat templates in.
    """

    def __init__(self, engine: "AsyncLLM", settings: ServerSettings) -> None:
        config: EngineConfig = engine.config
        self.engine = engine
        self.names: tuple[str, ...] = tuple(config.model.served_model_name) or (config.model.model,)
        self.max_model_len = config.model.max_model_len
        self.max_num_queued = config.scheduler.max_num_queued_reqs * config.parallel.data_parallel_size
        self.vocab_size = config.model.vocab_size
        self.check_num_logprobs = config.model.check_num_logprobs
        self.check_task = config.model.check_task
        self.task = config.model.task
        self.generates = config.model.pooler is None
        self.classifier = None if config.model.pooler is None else config.model.pooler.classifier
        vision = config.model.vision
        self.image_ids = None if vision is None or engine.tokenizer is None else vision.placeholder_ids
        self.created = int(time.time())
        self.default_sampling = _default_sampling(config.model)
        own_limit = config.model.generation_config.get("max_new_tokens")
        self.default_max_tokens = default_sampling_params(config.model).max_tokens if own_limit else None
        self.tokenizer: Any = engine.tokenizer
        self.has_own_chat_template = False
        self.chat_template = PLAIN_CHAT_TEMPLATE
        if own := settings.chat_template or getattr(self.tokenizer, "chat_template", None):
            self.has_own_chat_template = True
            self.chat_template = own
        elif self.tokenizer is not None and config.model.pooler is None:
            logger.warning(
                "%s has no chat template: /v1/chat/completions uses a plain one (a single user message unchanged, "
                "several as lines of 'role: text'); set another with --chat-template",
                self.names[0],
            )
        self.pair_prompts = None if self.classifier is None else PairPrompts(config.model, self.tokenizer)
        tokens = {} if self.tokenizer is None else special_tokens(self.tokenizer)
        self.chat_renderer = ChatRenderer(self.chat_template, tokens, f"the chat template of {self.names[0]}")
        self.score_renderer = self.chat_renderer if settings.chat_template else None
        self.tool_renderer, tool_template = self.chat_renderer, getattr(self.tokenizer, "tool_template", None)
        if tool_template and not settings.chat_template:
            whose = f"the chat template for tools (tool_use) of {self.names[0]}"
            self.tool_renderer = ChatRenderer(tool_template, tokens, whose)
        self.turn_formats = find_turn_formats(
            "\n".join(dict.fromkeys((self.chat_template, self.tool_renderer.template))),
            self.tokenizer,
            settings.tool_call_parser,
            settings.reasoning_parser,
            settings.reasoning_end_text,
        )
        engine.input_processor.thinking.formats = self.turn_formats
        if self.turn_formats.tool_calls or self.turn_formats.reasoning:
            logger.info(
                "parsing tool calls as %s, reasoning as %s (--tool-call-parser %s, --reasoning-parser %s)",
                self.turn_formats.tool_calls or "text",
                self.turn_formats.reasoning or "text",
                settings.tool_call_parser,
                settings.reasoning_parser,
            )
        self.prometheus_text = PrometheusText(config, self.names[0], settings.metrics_prefix)
        build = f"{__version__} {config.model.model} {config.model.revision} {config.model.dtype}"
        self.fingerprint = f"rustvllm-{__version__}-{hashlib.sha256(build.encode()).hexdigest()[:8]}"

    @property
    def adapters(self) -> "Mapping[str, LoadedAdapter]":
        """Those that requests may name, as far as this process knows."""
        return {} if self.engine.config.lora is None else self.engine.adapters

    async def refresh_adapters(self, *names: str | None) -> None:
        """Learn of what other API processes have loaded or removed, unless the model alone has these names."""
        own = (None, "", *self.names)
        if self.engine.config.lora is not None and not (names and all(name in own for name in names)):
            await self.engine.refresh_adapters()

    def adapter_request(self, name: str) -> LoRARequest | None:
        """What names an adapter to the engine: one that is loaded, which is not loaded again should it be gone.

        Args:
            name: As :meth:`resolve_name` gave it; None is for the model's own.

        Raises:
            UnknownModelError: The adapter was unloaded meanwhile: the model alone would be another answer.
        """
        if name in self.names:
            return None
        loaded = self.adapters.get(name)
        if loaded is None:
            raise UnknownModelError(name, (*self.names, *self.adapters))
        return LoRARequest(name, loaded.request.lora_int_id)

    def resolve_name(self, model: str | None) -> str:
        """The name to answer with: the one the client typed, or the first.

        Raises:
            UnknownModelError: Not a name of this model, nor of an adapter.
        """
        if model is None or model == "":
            return self.names[0]
        if model not in self.names and model not in self.adapters:
            raise UnknownModelError(model, (*self.names, *self.adapters))
        return model


def _default_sampling(model: "ModelConfig") -> dict[str, Any]:
    """The model's own sampling parameters where they differ from the API's, as far as the engine can honour them."""
    own, api = default_sampling_params(model), SamplingParams()
    names = (field.name for field in dataclasses.fields(SamplingParams) if field.name != "max_tokens")
    return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(api, name)}


class ServerState:
    """Shared by all endpoints; owned by the event loop's thread."""

    def __init__(self, settings: ServerSettings | None = None, load: ServerLoad | None = None) -> None:
        self.settings = settings or ServerSettings()
        self.is_traced = self.settings.tracing != TracingConfig() or is_debugging()
        self.status = ServerStatus.LOADING
        self._model: ServedModel | None = None
        # Ids of the engine requests in flight, so that a stop can end them with an answer.
        self.engine_request_ids: set[str] = set()
        self.num_open_requests = 0
        self.tracer: FrontTracer | None = None
        self.load = load or ServerLoad()
        self.adapter_download = asyncio.Lock()

    @property
    def model(self) -> ServedModel:
        """The served model; raises :class:`UnavailableError` while there is none."""
        if self._model is None:
            raise UnavailableError("The model is still loading.", retry_after=1)
        return self._model

    def set_ready(self, engine: "AsyncLLM", model: ServedModel | None = None) -> None:
        """The engine is loaded: serve. ``model`` holds it with what takes long to find out; None: found out here."""
        self._model = model or ServedModel(engine, self.settings)
        self.status = ServerStatus.READY
        if engine.config.lora is not None:
            engine.share_adapter_versions(self.load.adapter_versions, self.load.index)
        if self.is_traced:
            self.tracer = engine.tracer

    def check_serving(self) -> None:
        """Raise :class:`UnavailableError` unless requests can be served now."""
        if self.status is ServerStatus.LOADING:
            raise UnavailableError("The model is still loading.", retry_after=1)
        if self.status is ServerStatus.STOPPING:
            raise UnavailableError("The server is stopping.", retry_after=5)
        if self.settings.restart_engine and self.status is ServerStatus.READY and self.model.engine.errored:
            self.status = ServerStatus.RESTARTING
        if self.status is ServerStatus.RESTARTING:
            raise UnavailableError("The engine died; the server is starting it again.", retry_after=2)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are served, and what ``/health`` says about it.

        No engine is asked: one that hangs must not make this hang as well.
        """
        if self.status is not ServerStatus.READY:
            return False, {"status": self.status.value}
        engines = self.model.engine.health()
        alive = [engine for engine in engines if engine.death is None]
        if not alive:
            status = ServerStatus.RESTARTING if self.settings.restart_engine else ServerStatus.DEAD
            return False, {"status": status.value, "message": engines[0].death}
        worst = max(alive, key=lambda engine: engine.stalled_for)
        limit = self.settings.stall_timeout
        if limit and worst.stalled_for > limit:
            return False, {
                "status": "stalled",
                "engine": worst.rank,
                "seconds": round(worst.stalled_for, 1),
                "message": f"engine {worst.rank} has shown no sign of life for {worst.stalled_for:.1f} s "
                f"(--stall-timeout {limit:g})",
            }
        content: dict[str, Any] = {"status": "ok"}
        if len(alive) < len(engines):
            content["dead_engines"] = [engine.rank for engine in engines if engine.death is not None]
        return True, content

    @contextmanager
    def open_request(self, *, generates: bool) -> Iterator[None]:
        """Count a request as open, and as load if it generates."""
        self.num_open_requests += 1
        self.load.own[0] += generates
        try:
            yield
        finally:
            self.num_open_requests -= 1
            self.load.own[0] -= generates

    def close(self) -> None:
        """End the processes that render chat templates."""
        if self._model is not None:
            self._model.chat_renderer.close()
            self._model.tool_renderer.close()

    async def abort_all(self) -> None:
        """Abort every engine request; each open answer ends with finish reason ``abort``."""
        if self._model is None:
            return
        for request_id in list(self.engine_request_ids):
            await self._model.engine.abort(request_id)
