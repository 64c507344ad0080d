"""Runs the model over one step's batch and samples from it: two calls, and the logits are kept in between.

On a GPU neither call waits for the device: one stream brings the step's arrays, another takes the sampled tokens back
(``streams``). A stream that reads what another wrote, or overwrites what another reads, waits for that one's event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.backend import AttentionBackend
from rustvllm.attention.metadata import AttentionMetadata, visible_counts
from rustvllm.exceptions import SchedulerStateError
from rustvllm.logger import init_logger
from rustvllm.lora.store import AdapterStore
from rustvllm.models.interface import CausalLM
from rustvllm.sample.grammar_output import GrammarOutput
from rustvllm.sample.logprobs import GatheredLogprobs, ProcessedLogits
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.prompt_logprobs import GatheredPromptLogprobs
from rustvllm.sample.sampler import Sampler
from rustvllm.sample.scorer import Scorer
from rustvllm.worker.block_copier import BlockCopier
from rustvllm.worker.device_output import DeviceStepOutput, bring_to_host
from rustvllm.worker.drafts.model import DraftModel
from rustvllm.worker.drafts.rows import draft_rows
from rustvllm.worker.drafts.verify import DeviceDrafts, last_tokens
from rustvllm.worker.graphs.sampling import StepResult
from rustvllm.worker.graphs.step_graphs import StepGraphs
from rustvllm.worker.input_batch import InputBatch
from rustvllm.worker.pooler import Pooler
from rustvllm.worker.prompt_images import PromptImages
from rustvllm.worker.prompt_targets import PromptTargets
from rustvllm.worker.step_buffers import StepBuffers, send_array
from rustvllm.worker.step_output import ModelRunnerOutput, make_output
from rustvllm.worker.streams import DeviceStreams, Event

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput

logger = init_logger(__name__)

STATE_ERROR = "State error: sample_tokens() must be called after execute_model() returns None."


@dataclass(frozen=True, slots=True)
class _ExecutedStep:
    buffer_index: int
    logits: Tensor | None  # [num_sampled, vocab_size]; None when nothing is sampled
    rows: npt.NDArray[np.int32]
    metadata: SamplingMetadata
    drafts: DeviceDrafts | None = None  # None if there are none, so that each sample has one row of logits
    sampled: Tensor | None = None  # int32 [num_sampled, c], if chosen with the model; None: still to be sampled
    prompt_logprobs: GatheredPromptLogprobs | None = None  # None if no request asks for them
    pooled: Tensor | None = None  # float32 [num_sampled, width], in place of logits; None if the model generates


class GPUModelRunner:
    """Runs steps on one device (``cuda`` or ``cpu``).

    Args:
        model: Loaded, on the device.
        backend: Computes attention.
        input_batch: The persistent rows.
        device: The device of all of these.
        block_size: Tokens per KV block.
        async_scheduling: Whether a step may have −1 for tokens that the step before it samples.
        streams: The device's streams; None if the device does everything in order, as the CPU does.
        adapters: The model's adapters; None if it serves none.
        share_ids: Gives every rank that runs the same steps the first rank's ids, int32 ``[n]``, and may overwrite
            its argument; None if there is no other rank, or if no step has a −1.

    Attributes:
        kv_caches: One per layer; set when memory is allocated, like the next five.
        block_copier: Moves their blocks.
        draft_model: Guesses tokens; None if there is no second model.
        pooler: Makes vectors of prompts in place of tokens; None if the model generates.
        images: The images of prompts; None if the model sees none.
        step_buffers: The buffer sets that the scheduler writes.
        graphs: A step runs in one of them if it fits; None disables graphs.
        forward_ns: When the model began to run the last step (ns, monotonic).
        share_ids: As given.
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
        streams: DeviceStreams | None = None,
        adapters: AdapterStore | None = None,
        share_ids: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.input_batch = input_batch
        self.device = device
        self.block_size = block_size
        self.streams = streams
        self.adapters = adapters
        self.share_ids = share_ids
        self.sampler, self.scorer = Sampler(), Scorer()
        self.kv_caches: list[Tensor] = []
        self.block_copier: BlockCopier | None = None
        self.draft_model: DraftModel | None = None
        self.pooler: Pooler | None = None
        self.images: PromptImages | None = None
        self.step_buffers: list[StepBuffers] = []
        self.graphs: StepGraphs | None = None
        self.forward_ns = 0
        self._executed: _ExecutedStep | None = None
        self._forward_end: Event | None = None
        num_rows = input_batch.block_table.shape[0]
        self.last_token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device) if async_scheduling else None
        self._awaited: _ExecutedStep | None = None  # other ranks wait for its ids
        self._fetched: dict[int, Tensor] = {}  # by buffer set: int32, pinned, as long as needed so far

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> None:
        """Run the step's tokens through the model and keep the logits of the rows to be sampled.

        Raises:
            SchedulerStateError: The previous step was not sampled.
        """
        if self._executed is not None:
            raise SchedulerStateError(STATE_ERROR)
        with self.computing():
            self._execute(output)

    @property
    def tower_ns(self) -> int:
        """Time of the last step in which features of images were computed, before its forward pass (ns)."""
        return 0 if self.images is None else self.images.tower_ns

    def computing(self) -> AbstractContextManager[object]:
        """Make the compute stream, and so its device, the current one: the calling program may have set another."""
        return nullcontext() if self.streams is None else self.streams.use(self.streams.compute)

    def _execute(self, output: SchedulerOutput) -> None:
        step = self.step_buffers[output.buffer_index]
        step.begin()
        self.input_batch.update(output, step)
        if self.images is not None:
            self.images.update(output, step)
            self.model.given_rows = self.images.rows_of_step(output, step)
        if self.adapters is not None:
            of_requests = self.input_batch.adapters(step.int32("idx_mapping", output.num_reqs))
            starts = step.int32("query_start_loc", output.num_reqs + 1)
            self.adapters.begin_step(of_requests, starts)
        if self.draft_model is not None:  # only on the CPU, which reads the arrays where they are
            self.input_batch.write_block_table()
            self._move_blocks(output, step)
            self.draft_model.guess(output, step, self.input_batch.block_table)
        # A copy, because the batch keeps the rows for longer than the step.
        rows = step.int32("sampled_rows", output.num_sampled).copy()
        metadata, drafts = self._stage_sampling(output, step, rows)
        asked = PromptTargets.stage(output, step, self.input_batch) if output.num_prompt_logprobs else None
        # If a step needs only logits, or only the largest ones, one call may compute them together with the model.
        to_logits = output.num_sampled > 0 and asked is None and self.pooler is None
        chooses = to_logits and metadata.all_greedy and metadata.is_plain
        forward = self._stage_forward(output, step, drafts, to_logits=to_logits, chooses=chooses)
        step.send()
        self.input_batch.write_block_table()
        if self.draft_model is None:
            self._move_blocks(output, step)
        self.forward_ns = monotonic_ns()
        result = forward()
        if not self.model.stage.is_last:
            self._executed = _ExecutedStep(output.buffer_index, None, rows, metadata)
            return  # the last stage does the rest of the step
        if self.pooler is not None and result.hidden is not None:
            codes, pooled = self.pooler.pool(result.hidden, output, step)
            self._executed = _ExecutedStep(output.buffer_index, None, rows, metadata, sampled=codes, pooled=pooled)
            return
        of_prompts = None
        if asked is not None and result.hidden is not None:
            of_prompts = asked.score(result.hidden, self.model, self.scorer)
        logits, sampled = self._logits_of(result, output, step)
        if not metadata.is_plain:
            sampled = None
        # Meanwhile threads make the masks of structured output; the executor asks whether the forward pass is done.
        has_end = self.streams is not None and output.num_structured_output_reqs > 0
        self._forward_end = self.streams.compute.record_event() if has_end and self.streams is not None else None
        self._executed = _ExecutedStep(output.buffer_index, logits, rows, metadata, drafts, sampled, of_prompts)
        self._awaited = self._executed if output.num_sampled and self.share_ids is not None else None

    def _stage_sampling(
        self, output: SchedulerOutput, step: StepBuffers, rows: npt.NDArray[np.int32]
    ) -> tuple[SamplingMetadata, DeviceDrafts | None]:
        """The sampling metadata of a step, and its drafts if there are any; on the device once the step has been sent.

        Args:
            output: The scheduler's output.
            step: The step's arrays.
            rows: int32 ``[num_sampled]``, the persistent rows that are sampled.
        """
        if not output.num_sampled or self.pooler is not None:
            return SamplingMetadata(), None
        of_logits = draft_rows(output, step.arrays)
        drafts = None if of_logits is None else DeviceDrafts(of_logits, step)
        places = step.int32("logits_indices", output.num_logits)
        metadata = self.input_batch.sampling_metadata(
            rows if of_logits is None else rows[of_logits.requests],
            step.arrays["positions"][places] + 1,
            step,
            drafts,
        )
        return metadata, drafts

    def _logits_of(
        self, result: StepResult, output: SchedulerOutput, step: StepBuffers
    ) -> tuple[Tensor | None, Tensor | None]:
        """The logits ``[num_logits, vocab_size]`` that a step samples from, and the tokens chosen with the model.

        There are no such tokens if the logits have to be selected or computed here.
        """
        if not output.num_sampled:
            return None, None
        num_logits, logits, sampled = output.num_logits, result.logits, result.sampled
        if result.is_of_samples and num_logits > output.num_sampled:  # the graph computed no logits of drafts
            logits = sampled = None
        indices = None  # every token has a row of logits, in order, or the logits are selected already
        is_of_logits = result.is_of_logits or (result.is_of_samples and logits is not None)
        if num_logits < output.total_num_scheduled_tokens and not is_of_logits:
            indices, sampled = step.on_device("logits_indices", num_logits), None
        if logits is not None:
            logits = logits if indices is None else logits[indices]
        elif result.hidden is not None:
            logits = self.model.compute_logits(result.hidden if indices is None else result.hidden[indices])
        return logits, sampled

    def _move_blocks(self, output: SchedulerOutput, step: StepBuffers) -> None:
        if self.block_copier is not None:
            self.block_copier.execute(output, step)

    def is_forward_done(self) -> bool:
        """Whether the device has the logits of the step just executed; tracked only with structured output."""
        return self._forward_end is None or self._forward_end.query()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | DeviceStepOutput:
        """Sample one token for every row of logits of the step just executed, and keep the drafts that are right.

        Args:
            grammar_output: Masks for rows that follow grammars; None if every row may take every id.

        Raises:
            SchedulerStateError: No step was executed.
            ValueError: The masks have the wrong shape or dtype; the step is lost.
        """
        executed, self._executed = self._executed, None
        if executed is None:
            raise SchedulerStateError(STATE_ERROR)
        with self.computing():
            return self._sample(executed, grammar_output)

    def _sample(
        self, executed: _ExecutedStep, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | DeviceStepOutput:
        if executed.pooled is not None and executed.sampled is not None:
            return self._hand_over(executed, executed.sampled)
        if executed.logits is None:
            return self._hand_over(executed, torch.empty((0, 1), dtype=torch.int32, device=self.device))
        if executed.sampled is not None and grammar_output is None:
            # No row needs its tokens counted: such rows are not plain, so nothing was chosen with the model.
            if self.streams is None and self.last_token_ids is not None:
                self._keep_last(executed, last_tokens(executed.sampled))
            elif self.share_ids is not None and self.last_token_ids is not None:  # the graph has written them there
                rows = self.step_buffers[executed.buffer_index].on_device("sampled_rows", executed.rows.size)
                self._keep_last(executed, self.last_token_ids[rows])
            return self._hand_over(executed, executed.sampled)
        metadata = executed.metadata
        kept = self.scorer.keep_raw(executed.logits, metadata, will_mask=grammar_output is not None)
        if metadata.logprobs is not None and self.scorer.reads_processed:
            metadata = replace(metadata, processed=ProcessedLogits(metadata.logprobs))
        if grammar_output is not None:
            self._apply_grammar(executed, executed.logits, grammar_output)
        sampled = self.sampler.sample(executed.logits, metadata)
        kept = kept or self.scorer.of_processed(metadata)
        token_ids = sampled.clamp(min=0)  # a row without a token ends, so any id will do until then
        logprobs = None if kept is None else self.scorer.score_sampled(kept, token_ids)
        sampled = sampled.to(torch.int32)
        if grammar_output is not None and grammar_output.verdicts.any():
            ended = np.flatnonzero(grammar_output.verdicts)
            places = send_array(_rows_of(executed, grammar_output)[ended], self.device)
            sampled = sampled.index_copy(0, places, send_array(grammar_output.verdicts[ended], self.device))
        drawn = None if grammar_output is None else grammar_output.drawn(executed.rows.size)
        return self._hand_over(executed, self._accept(executed, sampled, token_ids, drawn), logprobs)

    def _accept(
        self,
        executed: _ExecutedStep,
        sampled: Tensor,
        token_ids: Tensor,
        drawn: npt.NDArray[np.int64] | None,
    ) -> Tensor:
        """The ids that each sample is given, int32 ``[num_sampled, c]``; they are also remembered for later steps.

        Args:
            executed: The step.
            sampled: int32 ``[n]``, the id of each row of logits.
            token_ids: int64 ``[n]``, the same with a valid id in place of a negative one.
            drawn: The samples whose tokens are not withheld; None if all count.
        """
        rows, drafts = executed.rows, executed.drafts
        if drafts is None:
            ids, last = sampled[:, None], token_ids.to(torch.int32)
            if drawn is None:
                self.input_batch.count(rows, token_ids)
            else:
                self.input_batch.count(rows[drawn], token_ids[send_array(drawn, self.device)])
        else:
            ids, last = drafts.accept(sampled)
            if drawn is None:
                self.input_batch.count_accepted(rows, ids)
            else:
                self.input_batch.count_accepted(rows[drawn], ids[send_array(drawn, self.device)])
        self._keep_last(executed, last)
        return ids

    def _keep_last(self, executed: _ExecutedStep, last: Tensor) -> None:
        """Keep the last id of each sample, int32 ``[num_sampled]``, on all ranks, for −1 entries of later steps."""
        if self.share_ids is not None:
            self._awaited = None
            last = self.share_ids(last.contiguous())
        if self.last_token_ids is not None:
            step = self.step_buffers[executed.buffer_index]
            self.last_token_ids[step.on_device("sampled_rows", executed.rows.size)] = last

    def follow_step(self) -> None:
        """End a step that another rank samples, and keep the ids that it shares."""
        executed, self._executed = self._executed, None
        if executed is None:
            raise SchedulerStateError(STATE_ERROR)
        self.give_awaited()
        if self.streams is not None:
            self.step_buffers[executed.buffer_index].release(self.streams.compute.record_event())

    @torch.inference_mode()
    def give_awaited(self) -> None:
        """Take part in sharing the last step's ids if that is still to be done; this rank has none and gives zeros.

        The other ranks wait for this, even if the step fails on the rank that samples.
        """
        if (awaited := self._awaited) is not None:
            with self.computing():
                self._keep_last(awaited, torch.zeros(awaited.rows.size, dtype=torch.int32, device=self.device))

    def discard_step(self) -> None:
        """Forget a step that was executed but will not be sampled, because something else failed.

        On return the device has finished every step launched so far, or has failed for good.
        """
        self._executed = None
        if self.streams is not None:
            try:
                self.streams.synchronize()
            except RuntimeError as error:  # reported with the step already, and again with the next one
                logger.warning("the device cannot recover: %s", error)

    def graph_size(self, output: SchedulerOutput) -> int:
        """See ``StepGraphs.size_for``."""
        return 0 if self.graphs is None else self.graphs.size_for(output)

    def _stage_forward(
        self,
        output: SchedulerOutput,
        step: StepBuffers,
        drafts: DeviceDrafts | None,
        *,
        to_logits: bool,
        chooses: bool,
    ) -> Callable[[], StepResult]:
        """Stage the forward pass of a step; the function it returns runs it, once the step has been sent.

        Args:
            output: The step.
            step: Its arrays.
            drafts: The drafts that it verifies; None if it has none.
            to_logits: Whether only logits are needed, and no hidden states.
            chooses: Whether the ids of the largest logits are needed, too.
        """
        has_adapters = self.adapters is not None and self.adapters.is_on
        if self.graphs is not None:
            replay = self.graphs.stage(output, step, has_adapters=has_adapters)
            if replay is not None:
                return replay
        if self.adapters is not None:
            self.adapters.stage_step(None if self.streams is None else step.stage)
        unknown = self._unknown_ids(output, step)
        planned = None
        if self.backend.takes_table_rows and self.streams is not None:  # this backend plans without reading the device
            planned = self.backend.plan(self._attention_metadata(output, step))

        def forward() -> StepResult:
            input_ids = step.on_device("input_ids", output.total_num_scheduled_tokens)
            if unknown is not None and self.last_token_ids is not None:
                places, rows = unknown
                input_ids = input_ids.index_copy(0, places, self.last_token_ids[rows])
            positions = step.on_device("positions", output.total_num_scheduled_tokens)
            if self.images is not None and (turned := self.images.positions_of_step(output, step)) is not None:
                positions = turned
            plan = planned or self.backend.plan(self._attention_metadata(output, step))
            if to_logits and self.streams is None:
                num_logits = output.num_logits
                is_every = num_logits == output.total_num_scheduled_tokens
                of_logits = None if is_every else step.on_device("logits_indices", num_logits)
                found = self.model.forward_logits(
                    input_ids, positions, self.kv_caches, plan, of_logits, chooses=chooses
                )
                if found is not None:
                    ids = None
                    if found.ids is not None:
                        ids = found.ids[:, None] if drafts is None else drafts.accept(found.ids)[0]
                    return StepResult(None, found.logits, ids, is_of_logits=True)
            return StepResult(self.model(input_ids, positions, self.kv_caches, plan))

        return forward

    def _unknown_ids(self, output: SchedulerOutput, step: StepBuffers) -> tuple[Tensor, Tensor] | None:
        """The indices of the step's tokens that the step before samples, and their rows, both staged.

        This token is the last one of its request, and −1 on the host.
        """
        if self.last_token_ids is None:
            return None
        last = step.int32("query_start_loc", output.num_reqs + 1)[1:] - 1
        unknown = np.flatnonzero(step.arrays["input_ids"][last] < 0)
        if not unknown.size:
            return None
        rows = step.int32("idx_mapping", output.num_reqs)[unknown]
        return step.stage(last[unknown].astype(np.int64)), step.stage(rows)

    def _attention_metadata(self, output: SchedulerOutput, step: StepBuffers) -> AttentionMetadata:
        num_reqs, num_tokens = output.num_reqs, output.total_num_scheduled_tokens
        rows = step.on_device("idx_mapping", num_reqs)
        if self.backend.takes_table_rows:
            block_table, table_rows = self.input_batch.block_table, rows
        else:
            block_table = self.input_batch.rows_of_block_table(rows, output.max_seq_len, self.block_size)
            table_rows = None
        return AttentionMetadata(
            block_size=self.block_size,
            block_table=block_table,
            table_rows=table_rows,
            slot_mapping=step.on_device("slot_mapping", num_tokens),
            query_start_loc=step.int32("query_start_loc", num_reqs + 1),
            seq_lens=step.int32("seq_lens", num_reqs),
            on_device=None
            if self.streams is None
            else (step.on_device("query_start_loc", num_reqs + 1), step.on_device("seq_lens", num_reqs)),
            stage=step.stage if self.streams is not None and self.backend.takes_table_rows else None,
            visible=self._visible(output, step),
        )

    def _visible(self, output: SchedulerOutput, step: StepBuffers) -> npt.NDArray[np.int32] | None:
        """``AttentionMetadata.visible``: None in steps without tokens of images that see each other."""
        if self.images is None or self.images.looks_ahead is None:
            return None
        starts, seq_lens = step.int32("query_start_loc", output.num_reqs + 1), step.int32("seq_lens", output.num_reqs)
        return visible_counts(starts, seq_lens, *self.images.looks_ahead)

    def _apply_grammar(self, executed: _ExecutedStep, logits: Tensor, grammar: GrammarOutput) -> None:
        """Mask the rows that get a token; in the others any token will do."""
        grammar.check(executed.rows.size, logits.shape[1])
        masked = np.flatnonzero(grammar.verdicts == 0)
        if masked.size:
            rows = send_array(_rows_of(executed, grammar)[masked], self.device)
            self.sampler.mask(logits, send_array(grammar.bitmask[masked], self.device), rows)

    def _hand_over(
        self,
        executed: _ExecutedStep,
        token_ids: Tensor,
        logprobs: GatheredLogprobs | None = None,
    ) -> ModelRunnerOutput | DeviceStepOutput:
        """Return the sampled ids, int32 ``[num_sampled, c]``, as soon as the device has them."""
        of_prompts = executed.prompt_logprobs
        of_samples = () if logprobs is None else logprobs.tensors
        pooled = () if executed.pooled is None else (executed.pooled,)
        tensors = (*of_samples, *(() if of_prompts is None else of_prompts.tensors), *pooled)
        if self.streams is None:
            if not tensors and executed.metadata.processors is None:
                return ModelRunnerOutput(token_ids.numpy())
            return _rest(executed, logprobs, [tensor.cpu() for tensor in tensors]).with_tokens(token_ids.cpu().numpy())
        fetched = self._fetched_ids(executed.buffer_index, token_ids)
        is_cuda = self.device.type == "cuda"
        # Allocated here and not in the step's set: few steps have such results, and their size varies.
        host = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=is_cuda) for t in tensors]
        rest = partial(_rest, executed, logprobs, host)
        output, computed = bring_to_host((token_ids, *tensors), (fetched, *host), self.streams, rest)
        self.step_buffers[executed.buffer_index].release(computed)
        return output

    def _fetched_ids(self, index: int, token_ids: Tensor) -> Tensor:
        """Pinned memory of a buffer set for the ids of its step, int32 and of the same shape."""
        size = token_ids.numel()
        if index not in self._fetched or self._fetched[index].numel() < size:
            size, is_cuda = max(size, self.input_batch.block_table.shape[0]), self.device.type == "cuda"
            self._fetched[index] = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        return self._fetched[index][: token_ids.numel()].view(token_ids.shape)


def _rest(executed: _ExecutedStep, logprobs: GatheredLogprobs | None, host: Sequence[Tensor]) -> ModelRunnerOutput:
    """The results of a step other than its tokens, from the tensors copied to the host."""
    processors, drafts, of_prompts = executed.metadata.processors, executed.drafts, executed.prompt_logprobs
    num_tensors = 0 if logprobs is None else len(logprobs.tensors)
    arrays = None if logprobs is None else logprobs.arrays(host[:num_tensors])
    if arrays is not None and drafts is not None:
        arrays = replace(arrays, places=drafts.rows.places[arrays.places].astype(np.int32))
    return make_output(
        None if arrays is None else arrays.as_tuple(),
        () if processors is None else [failure.message for failure in processors.failures.values()],
        None if of_prompts is None else of_prompts.arrays(host[num_tensors:]).as_tuple(),
        None if executed.pooled is None else host[-1].numpy(),
    )


def _rows_of(executed: _ExecutedStep, grammar: GrammarOutput) -> npt.NDArray[np.int64]:
    return grammar.rows(None if executed.drafts is None else executed.drafts.rows.first)
