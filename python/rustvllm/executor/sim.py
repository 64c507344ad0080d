"""``SimExecutor``: steps that take a set time and sample plain words, without weights and without torch.

The rest of the stack runs normally: scheduler, KV blocks, prefix cache, text, server. A token depends on the one before
it, on its position and, unless the request is greedy, on its seed. So other requests, preemption and chunks do not
change what a request gets.

Time passes as on a device with a queue: a step begins once it has been launched and the previous one is over, and ends
after its own time. The thread that waits for it sleeps and does not hold the GIL.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rustvllm import _core
from rustvllm.exceptions import ModelLoadError, SchedulerStateError
from rustvllm.logger import init_logger
from rustvllm.sample.listed_tokens import RowTokens, join
from rustvllm.sample.prompt_tokens import RowPromptTokens
from rustvllm.text.tokenizer import read_core_tokenizer
from rustvllm.worker.drafts.rows import DraftRows, draft_rows
from rustvllm.worker.step_output import POOLED, ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rustvllm.config import EngineConfig, SimConfig
    from rustvllm.sample.grammar_output import GrammarOutput

logger = init_logger(__name__)

MAX_DEFAULT_BLOCKS: Final = 1 << 18
"""The most blocks of the default cache: they hold nothing, but the pool's records of them take memory."""
_MIN_WORDS: Final = 16
_DTYPES: Final = {"int32": np.int32, "int64": np.int64, "float32": np.float32}
_GREEDY_TEMPERATURE: Final = 1e-5
_SPACES: Final = ("Ġ", "▁")
"""How vocabularies write the space before a word."""
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


_NUM_BITS: Final = np.array([half.bit_count() for half in range(1 << 16)], np.uint8)


_LogprobArrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class _ExecutedStep:
    """What the tokens of a step depend on, for each row of logits; drafts are verified as with a model."""

    rows: npt.NDArray[np.int32]
    last_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    drafts: DraftRows | None


@dataclass(frozen=True, slots=True)
class SimStepOutput:
    """A step whose tokens are known at once, but returned only when its time is over.

    Attributes:
        output: The step's results.
        end: When its time is over, in seconds of ``time.perf_counter``.
    """

    output: ModelRunnerOutput
    end: float

    def is_done(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() >= self.end

    def get_output(self) -> ModelRunnerOutput:
        """Sleep until the time is over."""
        if (left := self.end - time.perf_counter()) > 0:
            time.sleep(left)
        return self.output


class SimExecutor:
    """See the module and :class:`~rustvllm.executor.interface.Executor`.

    Attributes:
        words: int32; the ids that can be sampled.
        forward_ns: Always 0, because no model runs.
        tower_ns: Likewise.
    """

    forward_ns = 0
    tower_ns = 0

    def __init__(self, config: EngineConfig, sim: SimConfig) -> None:
        self._config = config
        self._sim = sim
        self.words: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._sets: list[dict[str, npt.NDArray[Any]]] = []
        num_rows = config.scheduler.max_num_seqs
        # What the tokens of each persistent row depend on.
        self._seeds = np.zeros(num_rows, np.uint64)
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._early_stops: dict[int, npt.NDArray[np.int32]] = {}  # ids that rows may not sample below min_tokens
        self._num_logprobs = np.full(num_rows, -1, np.int64)
        self._num_prompt_logprobs = np.full(num_rows, -1, np.int64)
        column = {name: index for index, name in enumerate(_core.SAMPLING_INT_COLUMNS)}
        self._int_columns = [column["seed"], column["num_prompt_tokens"], column["min_tokens"]]
        self._logprobs_column = column["num_logprobs"]
        self._prompt_logprobs_column = column["num_prompt_logprobs"]
        self._temperature_column = _core.SAMPLING_FLOAT_COLUMNS.index("temperature")
        self._eos = np.int32(config.model.eos_token_ids[0] if config.model.eos_token_ids else -1)
        self._last_sampled = np.zeros(num_rows, np.int32)
        self._executed: _ExecutedStep | None = None
        self._prompt_logprobs: _LogprobArrays | None = None
        self._extras_of_row: Callable[[int], _core.SamplingExtras | None] | None = None
        self._listed, self._prompt_tokens = RowTokens(), RowPromptTokens()
        self._extras_column = column["has_extras"]
        self._end = 0.0  # of the last launched step

    def load_model(self) -> None:
        """Choose the words of the vocabulary.

        Raises:
            ModelLoadError: The tokenizer cannot be read, or ``sim_eos_after`` is set but the model has no EOS token.
        """
        if self._sim.eos_after is not None and self._eos < 0:
            raise ModelLoadError("sim_eos_after is set, but the model's configuration has no eos_token_id")
        self.words = _find_words(self._config)
        logger.info("simulated executor: no model is loaded, tokens are %d words of the vocabulary", self.words.size)

    def determine_num_blocks(self) -> int:
        """``num_gpu_blocks_override``, else room for every request at full length (at most ``MAX_DEFAULT_BLOCKS``)."""
        cache, scheduler = self._config.cache, self._config.scheduler
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        blocks_per_seq = -(-self._config.model.max_model_len // cache.block_size)
        return 1 + max(blocks_per_seq, min(scheduler.max_num_seqs * blocks_per_seq, MAX_DEFAULT_BLOCKS))

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:  # noqa: ARG002 -- other executors use both
        """How many blocks of the model's real size ``swap_space`` would hold; 0 unless preemption swaps."""
        if self._config.scheduler.preemption_mode != "swap":
            return 0
        model, cache = self._config.model, self._config.cache
        itemsize = 4 if model.dtype == "float32" else 2
        per_block = 2 * itemsize * model.num_layers * model.num_kv_heads * model.head_dim * cache.block_size
        return max(1, min(int(cache.swap_space * 2**30) // per_block, MAX_DEFAULT_BLOCKS))

    def initialize_kv_cache(
        self,
        num_blocks: int,  # noqa: ARG002 -- blocks of a simulated cache hold nothing
        buffer_spec: Sequence[tuple[str, str, tuple[int, ...]]],
        num_sets: int,
        num_cpu_blocks: int = 0,  # noqa: ARG002 -- nor do swapped-out blocks
    ) -> list[dict[str, npt.NDArray[Any]]]:
        """Allocate the step buffers, in plain memory."""
        self._sets = [
            {name: np.zeros(shape, _DTYPES[dtype]) for name, dtype, shape in buffer_spec} for _ in range(num_sets)
        ]
        return self._sets

    def bind_token_ids(
        self,
        token_ids: Callable[[int], list[int]],  # noqa: ARG002 -- other executors use it
        sampling_extras: Callable[[int], _core.SamplingExtras | None] | None = None,
        multimodal: Callable[[int], list[tuple[int, int, bytes, bytes]]] | None = None,  # noqa: ARG002 -- likewise
    ) -> None:
        """Keep what says which tokens requests name; tokens depend on no earlier token than the last."""
        self._extras_of_row = sampling_extras

    def warm_up(self) -> None:
        """Do nothing."""

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Do nothing: a simulation computes nothing with an adapter."""

    def prepare_adapter(self, number: int, name: str, path: str) -> Callable[[], None]:
        """See :meth:`add_adapter`."""
        return lambda: self.add_adapter(number, name, path)

    def lora_ranks(self) -> Mapping[int, int]:
        """Empty, because there are no weights."""
        return {}

    def remove_adapter(self, number: int) -> bool:  # noqa: ARG002 -- other executors use it
        """Always True: there is nothing to remove."""
        return True

    def execute_model(self, scheduler_output: _core.SchedulerOutput) -> None:
        """Keep what the step's tokens depend on, and compute when the step is over.

        Raises:
            SchedulerStateError: The previous step was not sampled.
        """
        if self._executed is not None:
            raise SchedulerStateError("sample_tokens() must be called after execute_model()")
        sim, output = self._sim, scheduler_output
        arrays = self._sets[output.buffer_index]
        if sim.takes_time:
            duration = sim.step_time + sim.time_per_token * output.total_num_scheduled_tokens
            if sim.time_per_context_token:
                duration += sim.time_per_context_token * int(arrays["seq_lens"][: output.num_reqs].sum(dtype=np.int64))
            self._end = max(self._end, time.perf_counter()) + duration / 1000
        if output.num_new_reqs:
            self._admit(output.num_new_reqs, arrays)
        num_sampled = output.num_sampled
        rows = arrays["sampled_rows"][:num_sampled]
        of_logits = draft_rows(output, arrays)
        rows = rows if of_logits is None else rows[of_logits.requests]
        indices = arrays["logits_indices"][: output.num_logits]
        positions = arrays["positions"][indices] + 1  # of the tokens to be chosen
        last_ids = arrays["input_ids"][indices]
        last_ids = np.where(last_ids < 0, self._last_sampled[rows], last_ids)  # −1: sampled by a step in flight
        self._executed = _ExecutedStep(rows.copy(), last_ids, positions, of_logits)
        self._prompt_logprobs = self._make_up_prompt_logprobs(output, arrays) if output.num_prompt_logprobs else None

    def forward_ns_left(self) -> int:
        """The rest of the step's time."""
        return max(0, int(1e9 * (self._end - time.perf_counter())))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> SimStepOutput:
        """Choose the step's tokens, which can be fetched once its time is over.

        If a grammar does not allow the word, one of the tokens that it allows replaces it.

        Raises:
            SchedulerStateError: No step was executed.
        """
        executed, self._executed = self._executed, None
        if executed is None:
            raise SchedulerStateError("sample_tokens() must be called after execute_model()")
        rows, last_ids, positions, drafts = executed.rows, executed.last_ids, executed.positions, executed.drafts
        if self._config.model.pooler is not None:
            ids = np.full((rows.size, 1), POOLED, np.int32)
            pooled = _make_up_vectors(last_ids, positions, self._config.model.pooled_size)
            return SimStepOutput(ModelRunnerOutput(ids, pooled=pooled), self._end)
        sampled = self._choose(rows, last_ids, positions)
        if grammar_output is not None:
            of_logits = grammar_output.rows(None if drafts is None else drafts.first).astype(np.int32)
            self._obey(replace(grammar_output, places=of_logits), sampled, rows, last_ids, positions)
        logprobs = self._make_up_logprobs(np.maximum(sampled, 0), rows)
        if drafts is None:
            self._last_sampled[rows] = sampled
            ids = sampled[:, None]
        else:
            ids = drafts.accept(sampled)
            num_new = (ids >= 0).sum(axis=1)
            self._last_sampled[rows[drafts.first]] = ids[np.arange(len(ids)), np.maximum(num_new - 1, 0)]
            if logprobs is not None:
                logprobs = (drafts.places[logprobs[0]].astype(np.int32), *logprobs[1:])
        output = ModelRunnerOutput(ids, logprobs, self._prompt_logprobs).with_tokens(ids)
        return SimStepOutput(output, self._end)

    def discard_step(self) -> None:
        """Forget the step that was executed but will not be sampled, and the time of launched steps."""
        self._executed = None
        self._end = 0.0

    def watch(self, on_death: Callable[[], object]) -> None:
        """See ``Executor``; there is no process that could end."""

    def check(self) -> None:
        """See ``Executor``."""

    def rank_states(self) -> list[dict[str, Any]]:
        """See ``Executor``; there is only one rank."""
        return []

    def shutdown(self) -> None:
        """Free the step buffers."""
        self._sets = []

    def _admit(self, num_new_reqs: int, arrays: dict[str, npt.NDArray[Any]]) -> None:
        rows = arrays["new_rows"][:num_new_reqs]
        seed, num_prompt_tokens, min_tokens = arrays["sampling_int"][:num_new_reqs, self._int_columns].T
        is_greedy = arrays["sampling_float"][:num_new_reqs, self._temperature_column] < _GREEDY_TEMPERATURE
        self._seeds[rows] = np.where(is_greedy, 0, seed).astype(np.uint64)
        self._num_prompt_tokens[rows] = num_prompt_tokens
        self._min_tokens[rows] = min_tokens
        starts = arrays["stop_indptr"][: num_new_reqs + 1]
        if self._early_stops or starts[-1]:
            for row, start, end in zip(rows.tolist(), starts, starts[1:], strict=False):
                self._early_stops.pop(row, None)
                if end > start:
                    self._early_stops[row] = arrays["stop_token_ids"][start:end].copy()
        self._listed.drop(rows)
        self._prompt_tokens.drop(rows)
        for row in rows[arrays["sampling_int"][:num_new_reqs, self._extras_column] != 0].tolist():
            extras = None if self._extras_of_row is None else self._extras_of_row(row)
            if extras is not None:
                self._listed.admit(row, extras["logprob_token_ids"])
                self._prompt_tokens.admit(row, extras.prompt_tokens)
        self._num_logprobs[rows] = arrays["sampling_int"][:num_new_reqs, self._logprobs_column]
        self._num_prompt_logprobs[rows] = arrays["sampling_int"][:num_new_reqs, self._prompt_logprobs_column]

    def _choose(
        self, rows: npt.NDArray[np.int32], last_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """One token for each sampled row, ``[num_sampled]``."""
        state = self._random_numbers(rows, last_ids, positions)
        tokens = self.words[(state % np.uint64(self.words.size)).astype(np.int64)]
        num_outputs = positions - self._num_prompt_tokens[rows]
        if self._early_stops:
            self._avoid_early_stops(tokens, rows, num_outputs)
        if self._sim.eos_after is None:
            return tokens
        is_last = num_outputs == np.maximum(self._sim.eos_after, self._min_tokens[rows])
        return np.where(is_last, self._eos, tokens)

    def _random_numbers(
        self, rows: npt.NDArray[np.int32], last_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.uint64]:
        state = _mix(self._seeds[rows] + _GOLDEN * positions.astype(np.uint64))
        return _mix(state ^ (last_ids.astype(np.uint64) * _MIX_2))

    def _obey(
        self,
        grammar: GrammarOutput,
        sampled: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int32],
        last_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> None:
        """Replace tokens that grammars refuse with allowed ones, or with a negative verdict if the row gets none."""
        vocab_size = self._config.model.vocab_size
        grammar.check(sampled.size, vocab_size)
        numbers = self._random_numbers(rows, last_ids, positions)
        ids = sampled[grammar.places]
        is_allowed = grammar.bitmask[np.arange(len(ids)), ids // 32] >> (ids % 32) & 1
        sampled[grammar.places] = np.where(grammar.verdicts, grammar.verdicts, ids)
        refused = np.flatnonzero((grammar.verdicts == 0) & (is_allowed == 0))
        if refused.size:
            places = grammar.places[refused]
            sampled[places] = _nth_allowed(grammar.bitmask[refused], numbers[places])

    def _avoid_early_stops(
        self, tokens: npt.NDArray[np.int32], rows: npt.NDArray[np.int32], num_outputs: npt.NDArray[np.int64]
    ) -> None:
        """Replace tokens that would end a request below ``min_tokens`` with the next word."""
        for index in np.flatnonzero(num_outputs < self._min_tokens[rows]).tolist():
            stops = self._early_stops.get(int(rows[index]))
            if stops is None or tokens[index] not in stops:
                continue
            words = np.roll(self.words, -int(np.searchsorted(self.words, tokens[index])))
            if (allowed := words[~np.isin(words, stops)]).size:
                tokens[index] = allowed[0]

    def _make_up_logprobs(self, sampled: npt.NDArray[np.int32], rows: npt.NDArray[np.int32]) -> _LogprobArrays | None:
        """Log-probabilities for the rows that ask: the sampled token is likeliest, each next word half as likely.

        So is each next token where a row names some.
        """
        num_logprobs = self._num_logprobs[rows]
        which = np.flatnonzero(num_logprobs >= 0)
        if not which.size:
            return None
        wanted = np.minimum(num_logprobs[which], self.words.size)
        ids, values = self._candidates(sampled[which], int(wanted.max()))
        ids[:, 1:][np.arange(ids.shape[1] - 1) >= wanted[:, None]] = -1
        if (found := self._listed.find(rows[which])) is not None:
            host_rows, named = found
            of_places = np.log(0.5) * (2.0 + np.arange(named.shape[1]))
            of_named = np.where(named == ids[host_rows, :1], np.log(0.5), of_places).astype(np.float32)
            ids, values = join(ids, values, host_rows, named, of_named)
        return which.astype(np.int32), ids, values, np.ones(which.size, np.int32)

    def _make_up_prompt_logprobs(
        self, output: _core.SchedulerOutput, arrays: dict[str, npt.NDArray[Any]]
    ) -> _LogprobArrays:
        """Log-probabilities for the prompt tokens that the step needs; see ``_make_up_logprobs``."""
        num_reqs = output.num_prompt_logprobs_reqs
        rows = arrays["prompt_logprobs_rows"][:num_reqs]
        num_columns = 1 + np.minimum(self._num_prompt_logprobs[rows], self.words.size)
        starts = arrays["prompt_logprobs_indptr"][: num_reqs + 1]
        num_places = np.diff(starts)
        widths = np.repeat(num_columns, num_places)
        targets = arrays["prompt_logprobs_targets"][: output.num_prompt_logprobs]
        ids, values = self._candidates(targets, int(num_columns.max()) - 1)
        ranks = np.ones(targets.size, np.int32)
        first_places = arrays["positions"][arrays["prompt_logprobs_indices"][starts[:-1]]]
        named = self._prompt_tokens.find(rows, first_places, num_places)
        if named is None:
            is_wanted = np.arange(ids.shape[1]) < widths[:, None]
            return num_columns.astype(np.int32), ids[is_wanted], values[is_wanted], ranks
        of_named = np.broadcast_to(np.log(0.5) * (2.0 + np.arange(named.ids.shape[1])), named.ids.shape)
        all_ids, all_values = named.join(
            ids, values, widths, of_named.astype(np.float32), 0, np.repeat(named.widths, num_places)
        )
        return (num_columns + named.widths).astype(np.int32), all_ids, all_values, ranks

    def _candidates(
        self, own: npt.NDArray[np.int32], num_others: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and log-probabilities ``[n, 1 + num_others]``: the tokens ``own`` twice, then the next words."""
        places = np.arange(num_others)
        first = np.searchsorted(self.words, own)  # if it is not a word, its neighbours will do
        others = self.words[(first[:, None] + places) % self.words.size]
        others[:, :1] = own[:, None]
        ids = np.concatenate((own[:, None], others), axis=1, dtype=np.int32)
        values = np.log(0.5) * np.concatenate(([1.0], 1.0 + places))
        return ids, np.ascontiguousarray(np.broadcast_to(values, ids.shape), np.float32)


def _make_up_vectors(
    last_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], width: int
) -> npt.NDArray[np.float32]:
    """Vectors that depend on the prompts' last tokens and lengths, float32 ``[n, width]``."""
    phases = (1 + last_ids.astype(np.float64) + 0.1 * positions)[:, None] * np.arange(1, width + 1)
    return np.ascontiguousarray(np.sin(phases), np.float32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function."""
    x = (x ^ (x >> _SHIFTS[0])) * _MIX_1
    x = (x ^ (x >> _SHIFTS[1])) * _MIX_2
    return x ^ (x >> _SHIFTS[2])


def _nth_allowed(masks: npt.NDArray[np.int32], n: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """The id of each mask's nth set bit, counted from 0 and starting over after the last: ``[k, words]`` to ``[k]``."""
    halves = masks.view(np.uint16)
    num_until = _NUM_BITS[halves].cumsum(axis=1, dtype=np.int32)  # including each half
    rows = np.arange(len(masks))
    wanted = (n % num_until[:, -1].astype(np.uint64)).astype(np.int32)
    places = (num_until <= wanted[:, None]).sum(axis=1)
    found = halves[rows, places]
    left = wanted - (num_until[rows, places] - _NUM_BITS[found])
    bits = found[:, None] >> np.arange(16, dtype=np.uint16) & 1
    within = (bits.cumsum(axis=1) <= left[:, None]).sum(axis=1)
    return np.asarray(16 * places + within, np.int32)


def _find_words(config: EngineConfig) -> npt.NDArray[np.int32]:
    """Ids of plain words with a space before them; if there are few, of plain words without; else all ids but EOS."""
    model = config.model
    every = np.setdiff1d(np.arange(model.vocab_size, dtype=np.int32), np.asarray(model.eos_token_ids, np.int32))
    if model.tokenizer_path is None:
        return every
    tokenizer = read_core_tokenizer(model.tokenizer_path)
    entries = [(token_id, tokenizer.id_to_token(token_id) or "") for token_id in every.tolist()]
    words = [token_id for token_id, text in entries if text[:1] in _SPACES and _is_plain(text[1:])]
    if len(words) < _MIN_WORDS:
        words = [token_id for token_id, text in entries if _is_plain(text)]
    return np.asarray(words, np.int32) if words else every


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower()
