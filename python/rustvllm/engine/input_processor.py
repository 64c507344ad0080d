"""What a caller asks for, checked and turned into what the core takes: token ids and plain numbers.

Everything that can be wrong with a request is found here, before any of it reaches the engine.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic_ns

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.engine.request.checked_params import CheckedParams, TokenRules
from rustvllm.engine.request.core_request import (
    MASK64,
    EngineCoreRequest,
    EngineParams,
    engine_params,
    pooling_params,
    to_int64,
)
from rustvllm.engine.request.default_params import default_sampling_params
from rustvllm.engine.request.grammar_spec import make_grammar_spec
from rustvllm.engine.request.images import PromptImages, place_off_loop
from rustvllm.engine.request.pooling import filled_params
from rustvllm.engine.request.prompts import GivenPrompt, PromptIds, PromptType, read_prompt
from rustvllm.engine.request.sampling_extras import is_long, make_sampling_extras
from rustvllm.engine.request.thinking import ThinkingGates
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.expansion import MultimodalSpan
from rustvllm.logger import init_logger
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params import MAX_TOKENS_LIMIT, BeamSearchParams, PoolingParams, SamplingParams
from rustvllm.sampling_params.structured_outputs import GatedOutputs, ThinkingGate
from rustvllm.sampling_params.table import SAMPLING_LISTS
from rustvllm.tenant import Tenant
from rustvllm.text.prediction import PredictionReader
from rustvllm.text.tokenizer import Tokenizer

logger = init_logger(__name__)

_FEW_STOP_IDS = 16
_OFF_LOOP_CHARS = 2048
"""Longer prompts are tokenised in a thread of the core, so that they delay no other request on the event loop."""
_FEW_IDS = 1 << 15
"""Ids of a prompt in which a thought's marks are found within a millisecond."""
MAX_PROMPT_LOGPROBS = 1 << 26
"""Most log-probabilities of one prompt, candidates times places: half a GiB of numbers."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request whose parameters and shape are checked.

    Attributes:
        given: The prompt; its prediction is None where no drafts are made.
        ids: Of the prompt, as many as are kept; None: the text is still to be tokenised.
    """

    given: GivenPrompt
    ids: _core.TokenIds | None
    params: EngineParams
    priority: int
    tenant: Tenant | None
    began_ns: int


class InputProcessor:
    """Checks requests against one model and gives them what they leave open.

    Attributes:
        thinking: How the model marks its thoughts, and what limits them.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._model = config.model
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._max_num_queued = config.scheduler.max_num_queued_reqs
        self._priority_allowed = config.scheduler.scheduling_policy == "priority"
        self._tokenizer = tokenizer
        self._seed_numbers = itertools.count(1)  # next() is atomic: requests may be checked in several threads
        eos_ids = list(config.model.eos_token_ids)  # checked where the configuration was read
        own_eos = None if tokenizer is None else tokenizer.eos_token_id
        if own_eos is not None and own_eos >= config.model.vocab_size:
            logger.warning(
                "ignoring the tokenizer's end-of-sequence token: its id %d is outside the vocabulary (0 to %d)",
                own_eos,
                config.model.vocab_size - 1,
            )
        elif own_eos is not None and own_eos not in eos_ids:
            eos_ids.insert(0, own_eos)
        self.eos_token_ids = tuple(eos_ids)
        self._checked = CheckedParams()
        self.thinking = ThinkingGates(tokenizer)
        self._makes_drafts = config.speculation is not None
        self._prompt_ids = PromptIds(self._model, tokenizer)
        sizes = self._model.vocab_size, self.max_model_len, self._prompt_ids.max_token_chars
        self._predictions = PredictionReader(tokenizer, *sizes)
        self._images = PromptImages(self._model, tokenizer)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._model.max_model_len

    def process(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | None = None,
        priority: int = 0,
        *,
        tenant: Tenant | None = None,
    ) -> EngineCoreRequest:
        """Check one request.

        Args:
            prompt: Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
            params: None for the model's own defaults; ``PoolingParams`` for an embedding.
            priority: Lower is sooner; needs the priority policy unless 0.
            tenant: Who is charged for it, with the fair policy.

        Raises:
            InvalidRequestError: Names the parameter, the value and the limit.
        """
        asked = self._read(prompt, params, priority, tenant)
        ids = asked.ids
        if ids is None:
            assert self._tokenizer is not None
            ids = self._encoded(
                self._tokenizer.encode_ids(asked.given.text or "", asked.given.add_special_tokens), asked
            )
        spans: list[MultimodalSpan] = []
        if asked.given.images:
            ids, spans = self._images.place(ids, asked.given.images)
        prediction = None if asked.given.prediction is None else self._predictions.read(asked.given.prediction)
        return self._complete(asked, ids, self._gate_of(asked, ids), prediction, asked.began_ns, spans)

    async def process_off_loop(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | None = None,
        priority: int = 0,
        *,
        arrival_ns: int | None = None,
        tenant: Tenant | None = None,
    ) -> EngineCoreRequest:
        """The same on an event loop, which long lists and long texts do not hold up.

        Args:
            prompt: As for :meth:`process`.
            params: Likewise.
            priority: Likewise.
            arrival_ns: When the request came in; None: now.
            tenant: As for :meth:`process`.

        Raises:
            InvalidRequestError: As :meth:`process` does.
            QueueFullError: Too much text waits to be tokenised, or too many images to be decoded.
        """
        asked = self._read(prompt, params, priority, tenant)
        ids, text = asked.ids, asked.given.text or ""
        if ids is None:
            assert self._tokenizer is not None
            if len(text) > _OFF_LOOP_CHARS:
                self._prompt_ids.check_chars(len(text), asked.params, is_whole=bool(asked.given.images))
                ids = await self._tokenizer.encode_off_loop(text, asked.given.add_special_tokens)
            else:
                ids = self._tokenizer.encode_ids(text, asked.given.add_special_tokens)
            ids = self._encoded(ids, asked)
        spans: list[MultimodalSpan] = []
        if images := asked.given.images:
            ids, spans = await place_off_loop(self._images, ids, images)
        if asked.params.thinking_token_budget is not None and len(ids) > _FEW_IDS:
            gate = await asyncio.to_thread(self._gate_of, asked, ids)
        else:
            gate = self._gate_of(asked, ids)
        if _has_lists(asked.params) and self._checked.get(asked.params, gate) is None and is_long(asked.params):
            await asyncio.to_thread(self._rules_of, asked.params, gate)
        prediction = (
            None if asked.given.prediction is None else await self._predictions.read_off_loop(asked.given.prediction)
        )
        return self._complete(asked, ids, gate, prediction, asked.began_ns if arrival_ns is None else arrival_ns, spans)

    async def num_tokens_off_loop(self, ids: _core.TokenIds, images: Sequence[object]) -> int:
        """Tokens of a prompt with those of its images, which are processed for that as for an answer.

        Args:
            ids: Of the prompt, with one placeholder for each image.
            images: As in ``multi_modal_data``.

        Raises:
            InvalidRequestError: As :meth:`process` does for its images.
        """
        self._images.check(images)
        if images:
            ids, _ = await place_off_loop(self._images, ids, images)
        return len(ids)

    def check_max_tokens(self, max_tokens: int, param: str) -> None:
        """Refuse to generate more than the context holds, for callers who want that refused and not cut to fit.

        Args:
            max_tokens: What is asked for.
            param: The field that says so.

        Raises:
            InvalidRequestError: Names the field, its value and the limit.
        """
        if max_tokens > self.max_model_len:
            raise InvalidRequestError(f"{self._prompt_ids.context_length()}, but {param} is {max_tokens}.", param)

    def _read(
        self, prompt: PromptType, params: SamplingParams | PoolingParams | None, priority: int, tenant: Tenant | None
    ) -> _Asked:
        """All checks but those that need the tokens of a text."""
        began_ns = monotonic_ns()
        params = self._checked_params(params, priority)
        if tenant is not None and not isinstance(tenant, Tenant):
            raise InvalidRequestError(f"tenant must be a Tenant, got {type(tenant).__name__}", "tenant")
        given = read_prompt(prompt)
        if given.prediction is not None and not self._makes_drafts:
            given = replace(given, prediction=None)  # nothing would read it
        if given.images:
            self._images.check(given.images)
        ids = None
        if given.token_ids is not None:
            ids = self._prompt_ids.given(given.token_ids, params, is_whole=bool(given.images))
        elif self._tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer (skip_tokenizer_init): give the prompt as token ids", "prompt"
            )
        elif not given.text:  # a tokenizer that adds a beginning-of-sequence token would make a prompt of it
            raise InvalidRequestError("the prompt is empty: at least one character is needed", "prompt")
        return _Asked(given, ids, params, priority, tenant, began_ns)

    def _encoded(self, ids: _core.TokenIds, asked: _Asked) -> _core.TokenIds:
        given = asked.given
        return self._prompt_ids.encoded(
            ids, asked.params, add_special_tokens=given.add_special_tokens, is_whole=bool(given.images)
        )

    def _gate_of(self, asked: _Asked, ids: _core.TokenIds) -> ThinkingGate | None:
        if asked.params.thinking_token_budget is None:
            return None
        return self.thinking.gate(asked.params, asked.given.text, ids)

    def _complete(
        self,
        asked: _Asked,
        ids: _core.TokenIds,
        gate: ThinkingGate | None,
        prediction: _core.TokenIds | None,
        arrival_ns: int,
        spans: Sequence[MultimodalSpan] = (),
    ) -> EngineCoreRequest:
        params = asked.params
        if spans:
            self._prompt_ids.check_length(len(ids), params, is_whole=True)
        num_prompt_logprobs = self._num_logprobs(params.prompt_logprobs)
        if params.prompt_logprob_token_ids is not None:
            num_prompt_logprobs = max(num_prompt_logprobs, 0)  # they come with each token's own
            _check_num_rows(params, len(ids))
        _check_num_prompt_logprobs(num_prompt_logprobs, len(ids), params.num_prompt_token_ids)
        room = self.max_model_len - len(ids)
        rules = self._rules_of(params, gate)
        return EngineCoreRequest(
            prompt=asked.given.text,
            prompt_token_ids=ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_id=rules.eos_token_id,
            stop_token_ids=rules.stop_token_ids,
            hidden_stop_ids=rules.hidden_stop_ids,
            num_logprobs=self._num_candidates(params, rules),
            num_prompt_logprobs=num_prompt_logprobs,
            seed=self._next_seed() if params.seed is None else params.seed,
            priority=asked.priority,
            tenant=asked.tenant,
            cache_salt=asked.given.cache_salt,
            prediction=prediction,
            sampling_extras=rules.extras,
            grammar=rules.grammar,
            stop=rules.stop,
            multimodal=tuple(spans),
            arrival_ns=arrival_ns,
            began_ns=asked.began_ns,
            processed_ns=monotonic_ns(),
        )

    def _checked_params(
        self, params: SamplingParams | BeamSearchParams | PoolingParams | None, priority: object
    ) -> EngineParams:
        if isinstance(params, PoolingParams):
            made = pooling_params(filled_params(params, self._model))
            self._check_params(made, priority)
            return made
        if self._model.pooler is not None:
            self._model.check_task("generate")
        if params is None:
            params = default_sampling_params(self._model)
        elif isinstance(params, BeamSearchParams):
            params = params.sampling_params()
        elif not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        made = engine_params(params)
        self._check_params(made, priority)
        return made

    def _rules_of(self, params: EngineParams, gate: ThinkingGate | None) -> TokenRules:
        has_lists = _has_lists(params)
        if has_lists and (known := self._checked.get(params, gate)) is not None:
            return known
        extra_eos = () if params.ignore_eos else self.eos_token_ids[1:]
        stop_token_ids = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *extra_eos)))
        eos_token_id = None if params.ignore_eos or not self.eos_token_ids else self.eos_token_ids[0]
        ending_ids = stop_token_ids if eos_token_id is None else (eos_token_id, *stop_token_ids)
        wanted = (
            params.structured_outputs if gate is None else GatedOutputs(gate=gate, answer=params.structured_outputs)
        )
        rules = TokenRules(
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            hidden_stop_ids=frozenset(extra_eos).difference(params.stop_token_ids or ()),
            extras=make_sampling_extras(params, self._model, self._tokenizer, ending_ids) if has_lists else None,
            grammar=None if wanted is None else make_grammar_spec(wanted, self._tokenizer),
            stop=_core.StopStrings(params.stop_strings) if params.stop_strings else None,
        )
        if has_lists:
            self._checked.put(params, rules, gate)
        return rules

    def _check_params(self, params: EngineParams, priority: object) -> None:
        for token_id in params.stop_token_ids or ():
            if token_id >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token_id}, which is not in the vocabulary "
                    f"(0 to {self._model.vocab_size - 1})",
                    "stop_token_ids",
                )
        if params.thinking_token_budget is not None:
            self.thinking.check(params)
        for name in ("logprobs", "prompt_logprobs"):
            if (number := getattr(params, name)) is not None:
                self._model.check_num_logprobs(name, number)
        if 0 <= self._model.max_logprobs < params.num_prompt_token_ids:
            raise InvalidRequestError(
                f"prompt_logprob_token_ids has rows of {params.num_prompt_token_ids} ids, but the limit is "
                f"{self._model.max_logprobs}; raise the engine's max_logprobs for more (-1: no limit)",
                "prompt_logprob_token_ids",
            )
        if params.use_beam_search and not self._model.logprobs_mode.endswith("_logprobs"):
            raise InvalidRequestError(
                f"use_beam_search compares log-probabilities, but this engine returns {self._model.logprobs_mode} "
                "instead (logprobs_mode)",
                "use_beam_search",
            )
        if params.best_of is not None and not self._model.logprobs_mode.endswith("_logprobs"):
            raise InvalidRequestError(
                f"best_of ({params.best_of}) compares log-probabilities, but this engine returns "
                f"{self._model.logprobs_mode} instead (logprobs_mode)",
                "best_of",
            )
        if params.num_samples > self._max_num_queued:
            name = "n" if params.best_of is None else "best_of"
            raise InvalidRequestError(
                f"{name} is {params.num_samples}, but at most {self._max_num_queued} requests may wait "
                f"(max_num_queued_reqs): lower {name}",
                name,
            )
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer (skip_tokenizer_init), so stop strings cannot be found: use stop_token_ids",
                "stop",
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be an integer, got {priority!r}", "priority")
        if priority and not self._priority_allowed:
            raise InvalidRequestError(
                f"priority is {priority}, but requests are scheduled in order of arrival; "
                "set scheduling_policy='priority'",
                "priority",
            )
        if not -(2**31) <= priority < 2**31:
            raise InvalidRequestError(
                f"priority must fit into 32 bits, {-(2**31)} to {2**31 - 1}, got {shown(priority)}", "priority"
            )

    def _num_candidates(self, params: EngineParams, rules: TokenRules) -> int:
        """Candidates that each token needs for the caller, or for a choice; −1: not even its own."""
        if params.use_beam_search:
            num_ends = len(rules.stop_token_ids) + (rules.eos_token_id is not None)
            needed = params.n * max(2, 1 + num_ends)
            if params.n > self._max_num_seqs:
                raise InvalidRequestError(
                    f"a beam search may have at most max_num_seqs = {self._max_num_seqs} beams, got {params.n}: "
                    "lower n",
                    "n",
                )
            if needed > self._model.vocab_size:
                raise InvalidRequestError(
                    f"a search of {params.n} beams with {num_ends} tokens that end an output needs {needed} "
                    f"candidates, but the vocabulary has {self._model.vocab_size}: lower n",
                    "n",
                )
            return needed
        if params.logprob_token_ids:  # they come instead of the likeliest
            return 0
        # What is drawn and not returned is chosen by its log-probabilities.
        return max(self._num_logprobs(params.logprobs), -1 if params.best_of is None else 0)

    def _num_logprobs(self, asked: int | None) -> int:
        """Candidates per place; −1: not even its own token."""
        if asked is None:
            return -1
        return self._model.vocab_size if asked == -1 else min(asked, self._model.vocab_size)

    def _next_seed(self) -> int:
        """A seed of its own for each request that has none: a hash of the engine's seed and a count.

        The finaliser is SplitMix64's (Steele, Lea and Flood 2014), so neighbouring counts share nothing.
        """
        z = (self._model.seed * 0xD1342543DE82EF95 + next(self._seed_numbers) * 0x9E3779B97F4A7C15) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return to_int64(z ^ (z >> 31))


def _check_num_rows(params: EngineParams, num_prompt_tokens: int) -> None:
    start, num_rows = params.prompt_logprob_start or 0, len(params.prompt_logprob_token_ids)
    needed = max(0, num_prompt_tokens - 1 - start)
    if num_rows != needed:
        raise InvalidRequestError(
            f"prompt_logprob_token_ids has {num_rows} rows, but a prompt of {num_prompt_tokens} tokens needs {needed} "
            f"with prompt_logprob_start={start}: one for each token behind that place",
            "prompt_logprob_token_ids",
        )


def _check_num_prompt_logprobs(num_prompt_logprobs: int, num_prompt_tokens: int, num_named: int) -> None:
    num_all = (1 + num_prompt_logprobs + num_named) * num_prompt_tokens
    if num_all > MAX_PROMPT_LOGPROBS and num_named:
        raise InvalidRequestError(
            f"prompt_logprob_token_ids with {num_named} ids for each place, and prompt_logprobs with "
            f"{num_prompt_logprobs} candidates, are {num_all} log-probabilities of {num_prompt_tokens} tokens; the "
            f"limit per request is {MAX_PROMPT_LOGPROBS}: name fewer, or send a shorter prompt",
            "prompt_logprob_token_ids",
        )
    if num_all > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs of {num_prompt_tokens} tokens with {num_prompt_logprobs} candidates each are {num_all} "
            f"log-probabilities; the limit per request is {MAX_PROMPT_LOGPROBS}: ask for at most "
            f"{MAX_PROMPT_LOGPROBS // num_prompt_tokens - 1} candidates, or send a shorter prompt",
            "prompt_logprobs",
        )


def _has_lists(params: EngineParams) -> bool:
    """Whether parameters have what is worth being kept once it is checked, or takes long."""
    return bool(
        any(getattr(params, name) for name in SAMPLING_LISTS)
        or params.prompt_logprob_token_ids is not None
        or params.logits_processors
        or params.extra_args
        or params.structured_outputs
        or params.stop_strings
        or len(params.stop_token_ids or ()) > _FEW_STOP_IDS
    )


assert MAX_TOKENS_LIMIT < 2**31  # the core counts tokens in 32 bits
