"""The persistent batch: what each row's request has from step to step, changed by the differences that a step brings.

A row is a number that the scheduler gives a request for as long as it runs. ``new_rows`` fill rows, the block-table
differences extend them, and ``finished_rows`` and ``preempted_rows`` empty them. All changes are operations on whole
arrays. Python handles requests one by one only when they come in, and only those with penalties or list parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.sample.logprobs import LogprobsMetadata
from rustvllm.sample.metadata import GREEDY_TEMPERATURE, Penalties, SamplingMetadata
from rustvllm.sampling_params.table import FILTERS, PENALTIES
from rustvllm.worker.drafts.verify import DeviceDrafts, add_counts
from rustvllm.worker.row_extras import RowExtras
from rustvllm.worker.row_rules import SelectedRules
from rustvllm.worker.step_buffers import StepBuffers, send_array
from rustvllm.worker.token_counts import TokenCounts, TokenIds

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput


_Send = Callable[[npt.NDArray[Any]], Tensor]


@dataclass(frozen=True, slots=True)
class _SampledRows:
    rows: npt.NDArray[np.int32]
    random: npt.NDArray[np.int64] | None  # which of the rows are not greedy; None if all are greedy
    metadata: SamplingMetadata  # of these rows, without the parts that depend on the step
    is_lasting: bool  # whether the metadata's tensors are still valid in the next step
    any_min_tokens: bool
    any_penalties: bool
    rules: SelectedRules | None

    @property
    def is_steady(self) -> bool:
        """Whether the metadata is complete for every step, because nothing depends on the step."""
        return self.random is None and self.rules is None and not self.any_min_tokens and not self.any_penalties


class InputBatch:
    """Rows of at most ``max_num_seqs`` requests.

    Attributes:
        block_table: int32 ``[max_num_seqs + 1, max_blocks_per_seq]`` on the device; entries beyond the end of a
            sequence are stale. The last row belongs to no request and names the null block.
        token_ids: Returns a request's token ids, for penalties; None until it is set.
        extras: List parameters and custom logits processors.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        vocab_size: int,
        device: torch.device,
        float_columns: Sequence[str],
        int_columns: Sequence[str],
    ) -> None:
        self.device = device
        self.block_table = torch.zeros((max_num_seqs + 1, max_blocks_per_seq), dtype=torch.int32, device=device)
        self.token_ids: TokenIds | None = None
        self.extras = RowExtras(max_num_seqs, vocab_size, device)
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)
        # Parameters stay on the host: a step gathers those of its sampled rows and sends only what it needs.
        self._float = {name: index for index, name in enumerate(float_columns)}
        self._int = {name: index for index, name in enumerate(int_columns)}
        self._sampling_float = np.zeros((max_num_seqs, len(float_columns)), np.float32)
        self._sampling_int = np.zeros((max_num_seqs, len(int_columns)), np.int64)
        self._stop_ids = np.full((max_num_seqs, 0), -1, np.int64)  # padded with −1
        self._sampled_last: _SampledRows | None = None
        self._new_entries: tuple[Tensor, Tensor] | None = None

    @property
    def penalty_bytes(self) -> int:
        """Memory that penalties take on a GPU, however few requests have them; see ``TokenCounts``."""
        return self._counts.num_bytes

    def update(self, output: SchedulerOutput, step: StepBuffers) -> None:
        """Apply the differences of a step: first rows that left, then rows that came, then new blocks.

        New blocks are only staged: call ``write_block_table`` once the step has been sent.
        """
        if output.num_finished:
            self._drop(step.int32("finished_rows", output.num_finished))
        if output.num_preempted:
            self._drop(step.int32("preempted_rows", output.num_preempted))
        if output.num_new_reqs:
            self._admit(output.num_new_reqs, step)
        if output.num_block_table_updates:
            self._stage_block_table(output.num_block_table_updates, step)

    def write_block_table(self) -> None:
        """Write the new blocks of the step last updated into the block table on the device."""
        if self._new_entries is not None:
            (places, blocks), self._new_entries = self._new_entries, None
            self.block_table.view(-1).index_copy_(0, places, blocks)

    def num_prompt_logprobs(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """How many candidates each row's request wants per place of its prompt, ``[n]``; −1 if it wants none at all."""
        return np.asarray(self._sampling_int[rows, self._int["num_prompt_logprobs"]])

    def adapters(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The number of the adapter of each row's request, ``[n]``; 0 if it has none."""
        return np.asarray(self._sampling_int[rows, self._int["adapter"]])

    def rows_of_block_table(self, rows: Tensor, max_seq_len: int, block_size: int) -> Tensor:
        """Block tables of the requests of a step, int32 ``[num_reqs, blocks of the longest sequence]``."""
        return self.block_table[:, : -(-max_seq_len // block_size)].index_select(0, rows)

    def draws(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Temperatures and seeds of the requests in some rows, float32 and int64 ``[n]``."""
        floats, ints = self._float["temperature"], self._int["seed"]
        return self._sampling_float[rows, floats], self._sampling_int[rows, ints]

    def sampling_metadata(
        self,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        step: StepBuffers,
        drafts: DeviceDrafts | None = None,
    ) -> SamplingMetadata:
        """How a step's rows of logits are to be sampled.

        Args:
            rows: ``[n]``, the persistent row of each row of logits.
            positions: ``[n]``, the position of each token to be sampled: the number of tokens before it.
            step: The step's buffers; positions are staged there, so they are on the device once it has been sent.
            drafts: The step's drafts; None if it has none, so that each row occurs once.
        """
        sampled = self._sampled_last
        if sampled is None or not sampled.is_lasting or sampled.rows.tobytes() != rows.tobytes():
            # A step with drafts has its own rows of logits, so their parameters are sent with the rest of the step.
            send = step.stage if drafts is not None and self.device.type == "cuda" else self._send
            sampled = self._sampled_last = self._parameters(rows, send)
        processors = self.extras.processors.arrange(rows)
        if sampled.is_steady and processors is None:
            return sampled.metadata
        masked_rows = masked_ids = penalties = None
        if sampled.any_min_tokens:
            ints = self._sampling_int[rows]
            num_outputs = positions - ints[:, self._int["num_prompt_tokens"]]
            masked_rows, masked_ids = self._masked_ids(rows, num_outputs < ints[:, self._int["min_tokens"]])
        if sampled.any_penalties:
            penalties = self._penalties(rows, self._sampling_float[rows], drafts)
        return replace(
            sampled.metadata,
            positions=None if sampled.random is None else step.stage(positions[sampled.random].astype(np.int64)),
            masked_rows=masked_rows,
            masked_ids=masked_ids,
            penalties=penalties,
            rules=None if sampled.rules is None else self.extras.rules.now(sampled.rules, drafts),
            processors=processors,
        )

    def _parameters(self, rows: npt.NDArray[np.int32], send: _Send) -> _SampledRows:
        """The parameters that stay the same while the same rows are sampled."""
        floats, ints = self._sampling_float[rows], self._sampling_int[rows]
        temperature = floats[:, self._float["temperature"]]
        random = np.flatnonzero(temperature >= GREEDY_TEMPERATURE)
        logprobs = self._logprobs(rows, ints[:, self._int["num_logprobs"]], send)
        metadata = SamplingMetadata(logprobs=logprobs)
        if random.size:
            metadata = SamplingMetadata(
                random_rows=send(random),
                temperature=send(temperature[random]),
                seeds=send(ints[random, self._int["seed"]]),
                filters=self._filters(floats[random], ints[random], send),
                logprobs=logprobs,
            )
        return _SampledRows(
            rows,
            random if random.size else None,
            metadata,
            is_lasting=send == self._send,
            any_min_tokens=bool((ints[:, self._int["min_tokens"]] > 0).any()),
            any_penalties=bool((self._counts.slots(rows) >= 0).any()),
            rules=self.extras.rules.select(rows),
        )

    def _logprobs(
        self, rows: npt.NDArray[np.int32], num_logprobs: npt.NDArray[np.int64], send: _Send
    ) -> LogprobsMetadata | None:
        which = np.flatnonzero(num_logprobs >= 0)
        if not which.size:
            return None
        listed = self.extras.listed.select(rows[which], send)
        return LogprobsMetadata(send(which), which.astype(np.int32), num_logprobs[which].astype(np.int32), listed)

    def _filters(self, floats: npt.NDArray[np.float32], ints: npt.NDArray[np.int64], send: _Send) -> dict[str, Tensor]:
        """The filters that some of the rows ask for."""
        filters = {}
        for number in FILTERS:
            values = ints[:, self._int[number.name]] if number.is_integer else floats[:, self._float[number.name]]
            if (values != number.default).any():
                filters[number.name] = send(values)
        return filters

    def count(self, rows: npt.NDArray[np.int32], token_ids: Tensor) -> None:
        """Remember sampled tokens for rows that need it: ``[n]`` rows, int64 ``[n]`` ids on the device."""
        self.extras.append(rows, token_ids)
        if self._sampled_last is None or self._sampled_last.any_penalties:
            self._counts.add(rows, token_ids)

    def count_accepted(self, rows: npt.NDArray[np.int32], ids: Tensor) -> None:
        """Remember the tokens of a step with drafts: ``[r]`` rows, each once, int32 ``[r, c]`` ids on the device."""
        self.extras.append_accepted(rows, ids)
        if self._sampled_last is None or self._sampled_last.any_penalties:
            self._counts.add_accepted(rows, ids)

    def _admit(self, num_new_reqs: int, step: StepBuffers) -> None:
        self._sampled_last = None
        rows = step.int32("new_rows", num_new_reqs)
        self._sampling_float[rows] = step.arrays["sampling_float"][:num_new_reqs]
        self._sampling_int[rows] = step.arrays["sampling_int"][:num_new_reqs]
        self._admit_stop_ids(rows, step.int32("stop_indptr", num_new_reqs + 1), step.arrays["stop_token_ids"])
        self._drop(rows)  # a failed step may have ended a request without a finished_rows entry
        for row in rows[self._has_penalties(self._sampling_float[rows])].tolist():
            if self.token_ids is None:
                raise RuntimeError("penalties need the token ids of a request: call bind_token_ids first")
            num_prompt_tokens = int(self._sampling_int[row, self._int["num_prompt_tokens"]])
            self._counts.admit(row, self.token_ids(row), num_prompt_tokens)
        has_extras = self._sampling_int[rows, self._int["has_extras"]] != 0
        if self.extras.processors.processors or has_extras.any():
            self._admit_extras(rows if self.extras.processors.processors else rows[has_extras])

    def _admit_extras(self, rows: npt.NDArray[np.int32]) -> None:
        floats = [dict(zip(self._float, values, strict=True)) for values in self._sampling_float[rows].tolist()]
        ints = [dict(zip(self._int, values, strict=True)) for values in self._sampling_int[rows].tolist()]
        self.extras.admit(rows, floats, ints, self.token_ids)

    def _drop(self, rows: npt.NDArray[np.int32]) -> None:
        self._counts.drop(rows)
        self.extras.drop(rows)

    def _admit_stop_ids(
        self, rows: npt.NDArray[np.int32], indptr: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]
    ) -> None:
        counts = np.diff(indptr)
        longest = int(counts.max())
        if longest > self._stop_ids.shape[1]:
            padding = np.full((self._stop_ids.shape[0], longest - self._stop_ids.shape[1]), -1, np.int64)
            self._stop_ids = np.concatenate((self._stop_ids, padding), axis=1)
        self._stop_ids[rows] = -1
        which, column = _expand(counts)
        self._stop_ids[rows[which], column] = ids[indptr[0] : indptr[-1]]

    def _stage_block_table(self, num_updates: int, step: StepBuffers) -> None:
        indptr = step.int32("bt_indptr", num_updates + 1)
        which, offset = _expand(np.diff(indptr))
        rows = step.int32("bt_rows", num_updates)[which].astype(np.int64)
        columns = step.int32("bt_starts", num_updates)[which] + offset
        blocks = step.arrays["bt_block_ids"][indptr[0] : indptr[-1]]
        self._new_entries = step.stage(rows * self.block_table.shape[1] + columns), step.stage(blocks)

    def _masked_ids(
        self, rows: npt.NDArray[np.int32], too_short: npt.NDArray[np.bool_]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not too_short.any():
            return None, None
        stop_ids = np.where(too_short[:, None], self._stop_ids[rows], -1)
        which, column = np.nonzero(stop_ids >= 0)
        return self._send(which), self._send(stop_ids[which, column])

    def _has_penalties(self, floats: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        changed = [floats[:, self._float[number.name]] != number.default for number in PENALTIES]
        return np.asarray(np.logical_or.reduce(changed))

    def _penalties(
        self, rows: npt.NDArray[np.int32], floats: npt.NDArray[np.float32], drafts: DeviceDrafts | None
    ) -> Penalties | None:
        slots = self._counts.slots(rows)
        which = np.flatnonzero(slots >= 0)
        if not which.size:
            return None
        on_device = self._send(slots[which])
        floats = floats[which]
        output_counts, prompt_mask = self._counts.output_counts, self._counts.prompt_mask
        if drafts is not None:  # a request may have several rows, and the drafts before a row count for that row only
            places, ids = drafts.rows.earlier(which)
            output_counts, prompt_mask = output_counts[on_device], prompt_mask[on_device]
            on_device = torch.arange(which.size, device=self.device)
            add_counts(output_counts, self._send(places), self._send(ids))
        return Penalties(
            rows=self._send(which),
            slots=on_device,
            presence=self._send(floats[:, self._float["presence_penalty"]]),
            frequency=self._send(floats[:, self._float["frequency_penalty"]]),
            repetition=self._send(floats[:, self._float["repetition_penalty"]]),
            output_counts=output_counts,
            prompt_mask=prompt_mask,
        )

    def _send(self, array: npt.NDArray[np.generic]) -> Tensor:
        return send_array(array, self.device)


class FollowerBatch(InputBatch):
    """The rows of a rank that does not sample: only block tables, adapters and wishes for prompt logprobs."""

    def sampling_metadata(
        self,
        rows: npt.NDArray[np.int32],  # noqa: ARG002 -- the signature of the class above, here and below
        positions: npt.NDArray[np.int32],  # noqa: ARG002
        step: StepBuffers,  # noqa: ARG002
        drafts: DeviceDrafts | None = None,  # noqa: ARG002
    ) -> SamplingMetadata:
        """Empty: only rank 0 knows how rows are sampled."""
        return SamplingMetadata()

    def _admit(self, num_new_reqs: int, step: StepBuffers) -> None:
        rows = step.int32("new_rows", num_new_reqs)
        self._sampling_int[rows] = step.arrays["sampling_int"][:num_new_reqs]

    def _drop(self, rows: npt.NDArray[np.int32]) -> None:
        pass


def _expand(counts: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For ``counts = [2, 3]``: each entry's group, ``[0, 0, 1, 1, 1]``, and index in it, ``[0, 1, 0, 1, 2]``."""
    which = np.repeat(np.arange(counts.size), counts)
    starts = np.cumsum(counts) - counts
    return which, np.arange(which.size) - np.repeat(starts, counts)
