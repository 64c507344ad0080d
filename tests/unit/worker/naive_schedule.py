"""A naive scheduler: plain Python objects and lists, filling the same arrays as the Rust core.

It exists so that the runner can be driven into any situation on purpose: chunks of any size, preemption of a named
request at a named step, shared prefix blocks, rows used again at once. It decides nothing cleverly.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from rustvllm import _core
from rustvllm.attention.selector import make_attention_backend
from rustvllm.attention.torch_backend import TorchAttentionBackend
from rustvllm.models.interface import CausalLM
from rustvllm.worker.input_batch import InputBatch
from rustvllm.worker.model_runner import GPUModelRunner
from rustvllm.worker.step_buffers import StepBuffers
from rustvllm.worker.streams import make_streams

FLOAT_COLUMNS, INT_COLUMNS = _core.SAMPLING_FLOAT_COLUMNS, _core.SAMPLING_INT_COLUMNS
DEFAULTS = {number["name"]: number["default"] for number in _core.SAMPLING_NUMBERS}
DEFAULTS |= {"temperature": 0.0, "min_tokens": 0, "has_extras": 0, "num_multimodal": 0}


def buffer_spec(max_num_seqs, max_num_batched_tokens, max_blocks_per_seq):
    r, t = max_num_seqs, max_num_batched_tokens
    int32 = {
        "idx_mapping": r,
        "num_scheduled_tokens": r,
        "num_computed_tokens": r,
        "seq_lens": r,
        "query_start_loc": r + 1,
        "input_ids": t,
        "positions": t,
        "slot_mapping": t,
        "logits_indices": r,
        "sampled_rows": r,
        "new_rows": r,
        "stop_indptr": r + 1,
        "stop_token_ids": 64 * r,
        "bt_rows": r,
        "bt_starts": r,
        "bt_indptr": r + 1,
        "bt_block_ids": r * max_blocks_per_seq,
        "finished_rows": 2 * r,
        "preempted_rows": 2 * r,
    }
    spec = [(name, "int32", (size,)) for name, size in int32.items()]
    return [
        *spec,
        ("sampling_float", "float32", (r, len(FLOAT_COLUMNS))),
        ("sampling_int", "int64", (r, len(INT_COLUMNS))),
    ]


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    params: dict = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    arrives: int = 0  # step
    preempt_at: tuple[int, ...] = ()  # numbers of outputs at which it is preempted, once each
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    blocks_sent: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    num_shared_tokens: int = 0
    waiting: bool = True

    @property
    def tokens(self):
        return self.prompt + self.output

    @property
    def finished(self):
        return len(self.output) >= self.max_tokens or self.output[-1:] == [-1]


class NaiveEngine:
    """Drives a runner over a model until all requests are done."""

    def __init__(
        self,
        model: CausalLM,
        *,
        max_model_len=128,
        block_size=4,
        num_blocks=400,
        max_num_seqs=80,
        budget=2048,
        chunk=None,
        share_prefixes=False,
        poison=False,
        attention_backend="auto",
        backend_options=None,
        cache_dtype=None,
    ):
        self.block_size, self.budget, self.chunk, self.share_prefixes = block_size, budget, chunk, share_prefixes
        self.max_num_seqs = max_num_seqs
        max_blocks = -(-max_model_len // block_size)
        weight = model.embed_tokens.weight  # without memory where the numbers are packed, which is on the CPU
        device, dtype = torch.device("cpu") if weight.is_meta else weight.device, weight.dtype
        batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=max_blocks,
            vocab_size=model.vocab_size,
            device=device,
            float_columns=FLOAT_COLUMNS,
            int_columns=INT_COLUMNS,
        )
        if backend_options is None:
            threads = torch.get_num_threads()
            backend = make_attention_backend(
                attention_backend, model.kv_cache_spec, dtype, device, threads, cache_dtype=cache_dtype
            )
        else:
            backend = TorchAttentionBackend(model.kv_cache_spec, dtype, **backend_options)
        streams = make_streams(device)
        self.runner = GPUModelRunner(model, backend, batch, device=device, block_size=block_size, streams=streams)
        shape = model.kv_cache_spec.layer_shape(num_blocks, block_size, cache_dtype)
        self.runner.kv_caches = [
            torch.zeros(shape, dtype=cache_dtype or dtype, device=device) for _ in range(model.kv_cache_spec.num_layers)
        ]
        if poison:  # everything but the null block
            for cache in self.runner.kv_caches:
                if cache.dtype == torch.int8:
                    cache[:, 1:] = -1  # four bytes whose bits are all set are NaN
                    assert cache[0, 1, 0, 0, -4:].view(torch.float32).isnan()
                else:
                    cache[:, 1:] = torch.nan
        self.runner.step_buffers = [
            StepBuffers(buffer_spec(max_num_seqs, budget, max_blocks), device=device, streams=streams) for _ in range(2)
        ]
        batch.token_ids = lambda row: next(r for r in self.running if r.row == row).tokens
        self.free_blocks = list(range(num_blocks - 1, 0, -1))
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.running: list[Request] = []
        self.cached: dict[tuple[int, ...], int] = {}  # tokens up to the end of a block -> block
        self.references: dict[int, int] = {}
        self.left: dict[str, list[int]] = {"finished_rows": [], "preempted_rows": []}
        self.steps: list[SimpleNamespace] = []
        self.capture_logits = True

    def run(self, requests, max_steps=2000):
        pending = list(requests)
        for step in range(max_steps):
            if all(r.finished for r in pending):
                return requests
            self.preempt(
                [r for r in self.running if len(r.output) in r.preempt_at and r.num_computed >= len(r.tokens) - 1]
            )
            self.admit([r for r in pending if r.waiting and not r.finished and r.arrives <= step])
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def preempt(self, victims):
        for r in victims:
            r.preempt_at = tuple(n for n in r.preempt_at if n != len(r.output))
            r.num_preemptions += 1
            self.leave(r, "preempted_rows")
            r.waiting = True

    def admit(self, waiting):
        for r in waiting:
            if not self.free_rows:
                return
            r.row, r.waiting = self.free_rows.pop(), False
            r.num_computed, r.blocks_sent, r.blocks = 0, 0, []
            r.admitted = False
            self.running.append(r)

    def leave(self, r, how):
        self.left[how].append(r.row)
        self.free_rows.append(r.row)  # may be given away in the same step
        for block in r.blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.cached = {key: b for key, b in self.cached.items() if b != block}
                self.free_blocks.append(block)
        self.running.remove(r)

    def take_prefix(self, r):
        """Blocks of other requests whose tokens are the same; they may be filled in this very step."""
        bs = self.block_size
        while len(r.blocks) * bs + bs < len(r.tokens):
            block = self.cached.get(tuple(r.tokens[: len(r.blocks) * bs + bs]))
            if block is None:
                break
            r.blocks.append(block)
            self.references[block] += 1
        r.num_computed = len(r.blocks) * bs
        r.num_shared_tokens += r.num_computed

    def step(self):
        bs = self.block_size
        step = self.runner.step_buffers[len(self.steps) % 2]
        arrays = {name: [] for name in step.arrays}
        arrays["query_start_loc"], arrays["stop_indptr"], arrays["bt_indptr"] = [0], [0], [0]
        budget, sampled = self.budget, []
        for r in self.running:
            if budget == 0:
                break
            if not r.admitted and self.share_prefixes:
                self.take_prefix(r)
            n = min(len(r.tokens) - r.num_computed, budget, self.chunk or budget)
            if not r.admitted:
                r.admitted = True
                params = DEFAULTS | r.params | {"num_prompt_tokens": len(r.prompt)}
                arrays["new_rows"].append(r.row)
                arrays["sampling_float"].append([params[c] for c in FLOAT_COLUMNS])
                arrays["sampling_int"].append([params[c] for c in INT_COLUMNS])
                arrays["stop_token_ids"] += r.stop_token_ids
                arrays["stop_indptr"].append(len(arrays["stop_token_ids"]))
            while len(r.blocks) * bs < r.num_computed + n:
                block = self.free_blocks.pop()
                self.references[block] = 1
                r.blocks.append(block)
            if self.share_prefixes:
                for i in range((r.num_computed + n) // bs):
                    self.cached.setdefault(tuple(r.tokens[: (i + 1) * bs]), r.blocks[i])
            if len(r.blocks) > r.blocks_sent:
                arrays["bt_rows"].append(r.row)
                arrays["bt_starts"].append(r.blocks_sent)
                arrays["bt_block_ids"] += r.blocks[r.blocks_sent :]
                arrays["bt_indptr"].append(len(arrays["bt_block_ids"]))
                r.blocks_sent = len(r.blocks)
            positions = range(r.num_computed, r.num_computed + n)
            arrays["idx_mapping"].append(r.row)
            arrays["num_scheduled_tokens"].append(n)
            arrays["num_computed_tokens"].append(r.num_computed)
            arrays["seq_lens"].append(r.num_computed + n)
            arrays["input_ids"] += [r.tokens[p] for p in positions]
            arrays["positions"] += positions
            arrays["slot_mapping"] += [r.blocks[p // bs] * bs + p % bs for p in positions]
            arrays["query_start_loc"].append(len(arrays["input_ids"]))
            r.num_computed += n
            budget -= n
            if r.num_computed == len(r.tokens):
                arrays["logits_indices"].append(len(arrays["input_ids"]) - 1)
                arrays["sampled_rows"].append(r.row)
                sampled.append(r)
        arrays |= self.left
        self.left = {"finished_rows": [], "preempted_rows": []}
        for name, values in arrays.items():
            step.arrays[name][:] = -7  # what is not written must not matter
            if values:
                step.arrays[name][: len(values)] = np.array(values)
        output = SimpleNamespace(
            step=len(self.steps),
            buffer_index=len(self.steps) % 2,
            num_reqs=len(arrays["idx_mapping"]),
            total_num_scheduled_tokens=len(arrays["input_ids"]),
            max_num_scheduled_tokens=max(arrays["num_scheduled_tokens"], default=0),
            max_seq_len=max(arrays["seq_lens"], default=0),
            num_sampled=len(sampled),
            num_logits=len(sampled),
            num_prompt_logprobs=0,
            num_new_reqs=len(arrays["new_rows"]),
            num_block_table_updates=len(arrays["bt_rows"]),
            num_finished=len(arrays["finished_rows"]),
            num_preempted=len(arrays["preempted_rows"]),
            num_swap_out=0,
            num_swap_in=0,
            num_copies=0,
            num_structured_output_reqs=0,
        )
        self.steps.append(output)
        if output.num_reqs == 0:
            return
        self.runner.execute_model(output)
        logits = self.runner._executed.logits
        if self.capture_logits and logits is not None:
            logits = logits.float().clone().cpu()
        ids = self.runner.sample_tokens().get_output().sampled_token_ids
        assert ids.shape == (len(sampled), 1)
        assert ids.dtype == np.int32
        for i, r in enumerate(sampled):
            r.output.append(int(ids[i, 0]))
            if self.capture_logits:
                r.logits.append(logits[i])
            if r.finished:
                self.leave(r, "finished_rows")
