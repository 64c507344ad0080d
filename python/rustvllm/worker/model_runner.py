"""Runs the model over one step's batch and samples from it: two calls, with the logits kept in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.backend import AttentionBackend
from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.exceptions import SchedulerStateError
from rustvllm.models.interface import CausalLM
from rustvllm.sample.logprobs import gather_logprobs, raw_logprobs
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.prompt_logprobs import PromptLogprobsArrays, prompt_logprobs
from rustvllm.sample.sampler import Sampler
from rustvllm.worker.block_copier import BlockCopier
from rustvllm.worker.input_batch import InputBatch
from rustvllm.worker.step_buffers import StepBuffers
from rustvllm.worker.step_output import ModelRunnerOutput, make_output

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput

STATE_ERROR = "State error: sample_tokens() must be called after execute_model() returns None."


@dataclass(frozen=True, slots=True)
class _ExecutedStep:
    logits: Tensor | None  # [num_sampled, vocab_size]; None when nothing is sampled
    rows: npt.NDArray[np.int32]
    metadata: SamplingMetadata
    prompt_logprobs: PromptLogprobsArrays | None = None  # None: nobody asks


class GPUModelRunner:
    """Runs steps on one device (``cuda`` or ``cpu``).

    Args:
        model: filled, on the device.
        backend: computes attention.
        input_batch: the persistent rows.
        device: of all of these.
        block_size: tokens per KV block.
        async_scheduling: a step may hold −1 for tokens that the step before it samples.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        input_batch: InputBatch,
        *,
        device: torch.device,
        block_size: int,
        async_scheduling: bool = False,
    ) -> None:
        self.model = model
        self.backend = backend
        self.input_batch = input_batch
        self.device = device
        self.block_size = block_size
        self.sampler = Sampler()
        self.kv_caches: list[Tensor] = []
        self.block_copier: BlockCopier | None = None  # there once the caches are
        self.step_buffers: list[StepBuffers] = []
        self._executed: _ExecutedStep | None = None
        num_rows = input_batch.block_table.shape[0]
        self._last_token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device) if async_scheduling else None

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> None:
        """Run the step's tokens through the model and keep the logits of the rows to be sampled.

        Raises:
            SchedulerStateError: the step before was not sampled.
        """
        if self._executed is not None:
            raise SchedulerStateError(STATE_ERROR)
        step = self.step_buffers[output.buffer_index]
        self.input_batch.update(output, step)
        if self.block_copier is not None:
            self.block_copier.execute(output, step)
        num_tokens, num_sampled = output.total_num_scheduled_tokens, output.num_sampled
        hidden = self.model(
            self._input_ids(output, step),
            step.on_device("positions", num_tokens, self.device),
            self.kv_caches,
            self.backend.plan(self._attention_metadata(output, step)),
        )
        of_prompts = self._prompt_logprobs(output, step, hidden) if output.num_prompt_logprobs else None
        # Copies: the buffers are the core's again before the sampled rows are counted.
        rows = step.int32("sampled_rows", num_sampled).copy()
        if num_sampled == 0:
            self._executed = _ExecutedStep(None, rows, SamplingMetadata(), of_prompts)
            return
        indices = step.int32("logits_indices", num_sampled)
        metadata = self.input_batch.sampling_metadata(rows, step.arrays["positions"][indices] + 1)
        if num_sampled < num_tokens:  # otherwise each token is sampled behind, in order
            hidden = hidden[step.on_device("logits_indices", num_sampled, self.device)]
        self._executed = _ExecutedStep(self.model.compute_logits(hidden), rows, metadata, of_prompts)

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput:
        """Draw one token for every sampled row of the step just executed.

        Raises:
            SchedulerStateError: no step was executed.
        """
        executed, self._executed = self._executed, None
        if executed is None:
            raise SchedulerStateError(STATE_ERROR)
        of_prompts = None if executed.prompt_logprobs is None else executed.prompt_logprobs.as_tuple()
        if executed.logits is None:
            return ModelRunnerOutput(np.empty((0, 1), np.int32), prompt_logprobs=of_prompts)
        wanted = executed.metadata.logprobs
        # The sampler may write into the logits.
        raw = None if wanted is None else raw_logprobs(executed.logits, wanted)
        sampled = self.sampler.sample(executed.logits, executed.metadata)
        token_ids = sampled.clamp(min=0)  # a row without a token ends; until then any id will do
        self.input_batch.count(executed.rows, token_ids)
        logprobs = None
        if wanted is not None and raw is not None:
            logprobs = gather_logprobs(raw, token_ids, wanted).as_tuple()
        if self._last_token_ids is not None:
            self._last_token_ids[torch.from_numpy(executed.rows).to(self.device)] = token_ids.to(torch.int32)
        processors = executed.metadata.processors
        return make_output(
            sampled.to(device="cpu", dtype=torch.int32).numpy(),
            logprobs,
            () if processors is None else processors.failures.values(),
            of_prompts,
        )

    def discard_step(self) -> None:
        """Forget a step that was executed and will not be sampled, because something else failed."""
        self._executed = None

    @torch.inference_mode()
    def profile_run(self, seq_lens: Sequence[int], dtype: torch.dtype) -> None:
        """Run a batch of prompts of some lengths, sampling each, to see what memory a step takes at most.

        The cache it writes is its own, one layer's worth shared by all layers.
        """
        lens = np.asarray(seq_lens, np.int32)
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lens)
        num_blocks = -(-lens // self.block_size)
        first_block = 1 + np.cumsum(num_blocks) - num_blocks  # after the null block
        columns = np.arange(int(num_blocks.max()), dtype=np.int32)
        block_table = (first_block[:, None] + columns).clip(max=int(num_blocks.sum())).astype(np.int32)
        slots = np.repeat(first_block, lens) * self.block_size + positions
        spec = self.model.kv_cache_spec
        cache = torch.zeros(
            spec.layer_shape(1 + int(num_blocks.sum()), self.block_size), dtype=dtype, device=self.device
        )

        def send(array: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        metadata = AttentionMetadata(self.block_size, send(block_table), send(slots.astype(np.int32)), starts, lens)
        input_ids = torch.zeros(int(starts[-1]), dtype=torch.int32, device=self.device)
        caches = [cache] * spec.num_layers
        hidden = self.model(input_ids, send(positions), caches, self.backend.plan(metadata))
        logits = self.model.compute_logits(hidden[send(starts[1:] - 1)])
        ones = np.ones(lens.size, np.float32)
        rows = np.arange(lens.size)
        self.sampler.sample(
            logits,
            SamplingMetadata(
                random_rows=send(rows),
                temperature=send(ones),
                seeds=send(rows),
                positions=send(rows),
                top_p=send(ones * np.float32(0.9999)),
            ),
        )

    def _input_ids(self, output: SchedulerOutput, step: StepBuffers) -> Tensor:
        """The step's tokens; a −1, the last token of its request, is what was sampled last in the request's row."""
        input_ids = step.on_device("input_ids", output.total_num_scheduled_tokens, self.device)
        if self._last_token_ids is None:
            return input_ids
        last = step.int32("query_start_loc", output.num_reqs + 1)[1:] - 1
        unknown = np.flatnonzero(step.arrays["input_ids"][last] < 0)
        if not unknown.size:
            return input_ids
        rows = step.int32("idx_mapping", output.num_reqs)[unknown]
        known = self._last_token_ids[torch.from_numpy(rows).to(self.device)]
        return input_ids.index_copy(0, torch.from_numpy(last[unknown].astype(np.int64)).to(self.device), known)

    def _prompt_logprobs(self, output: SchedulerOutput, step: StepBuffers, hidden: Tensor) -> PromptLogprobsArrays:
        """What is said of prompts, some of whose tokens the step has run."""
        num_tokens, num_reqs = output.num_prompt_logprobs, output.num_prompt_logprobs_reqs
        return prompt_logprobs(
            hidden[step.on_device("prompt_logprobs_indices", num_tokens, self.device)],
            self.model.compute_logits,
            self.model.vocab_size,
            step.on_device("prompt_logprobs_targets", num_tokens, self.device),
            np.diff(step.int32("prompt_logprobs_indptr", num_reqs + 1)),
            self.input_batch.num_prompt_logprobs(step.int32("prompt_logprobs_rows", num_reqs)),
        )

    def _attention_metadata(self, output: SchedulerOutput, step: StepBuffers) -> AttentionMetadata:
        num_reqs, num_tokens = output.num_reqs, output.total_num_scheduled_tokens
        rows = step.on_device("idx_mapping", num_reqs, self.device)
        return AttentionMetadata(
            block_size=self.block_size,
            block_table=self.input_batch.rows_of_block_table(rows, output.max_seq_len, self.block_size),
            slot_mapping=step.on_device("slot_mapping", num_tokens, self.device),
            query_start_loc=step.int32("query_start_loc", num_reqs + 1),
            seq_lens=step.int32("seq_lens", num_reqs),
        )
