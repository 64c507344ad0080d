"""What ``rustvllm bench kernels`` times: attention, dense layers and the sampler, alone, on one device.

Contenders take turns, so that what the machine does meanwhile happens to all of them; the least time counts. Each line
is compared with what the device can do: how fast it reads memory and multiplies matrices, measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.selector import make_attention_backend
from rustvllm.config.attention_backends import backends_of
from rustvllm.layers.cpu.linear import CORE_DTYPES, CoreLinear, OneDnnLinear, TorchLinear
from rustvllm.layers.linear import LinearKernel
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.sampler import Sampler
from rustvllm.worker.host_resources import num_compute_threads
from rustvllm.worker.worker import DTYPES

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its kernels' times depend on."""

    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def dense_layers(self) -> dict[str, tuple[int, int]]:
        """Name → ``(out_features, in_features)`` of a decoder layer's products and of the head."""
        heads = self.num_heads * self.head_dim
        return {
            "qkv": (heads + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "out": (self.hidden_size, heads),
            "up": (self.inner_size, self.hidden_size),
            "down": (self.hidden_size, self.inner_size),
            "head": (self.vocab_size, self.hidden_size),
        }


SHAPES = {
    "gpt2": ModelShape(768, 3072, 12, 12, 64, 50257),
    "qwen2.5-0.5b": ModelShape(896, 4864, 14, 2, 64, 151936),
    "llama-3-8b": ModelShape(4096, 14336, 32, 8, 128, 128256),
}
BLOCK_SIZE = 16
LINEAR_ROWS = (1, 8, 32, 128)
SAMPLED_ROWS = (1, 32)
LAUNCH_CYCLES = 400_000
"""Cycles of a GPU that outlast the launching of any run here, some 0.2 ms."""
STEPS = {
    "decode": ((1, 512, 1), (8, 512, 1), (32, 512, 1), (1, 4096, 1)),
    "prefill": ((1, 128, 128), (4, 512, 512), (1, 1024, 128)),
}
"""Requests, tokens of each, new ones among them."""


class KernelBench:
    """See the module.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: Name of the dtype of weights and cache.
        shape: A key of ``SHAPES``.
        num_rounds: Turns of each contender.
    """

    def __init__(self, device: str, dtype: str, shape: str, num_rounds: int) -> None:
        self._device = torch.device(device)
        self._dtype = DTYPES[dtype]
        self._shape = SHAPES[shape]
        self._num_rounds = num_rounds
        self._num_threads = num_compute_threads() if device == "cpu" else torch.get_num_threads()
        if device == "cpu":
            torch.set_num_threads(self._num_threads)
        self._generator = torch.Generator(device=self._device).manual_seed(0)

    def facts(self) -> dict[str, Any]:
        """What the times depend on."""
        cuda = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self._device) if cuda else "cpu",
            "torch": torch.__version__,
            "num_threads": self._num_threads,
        }

    @torch.inference_mode()
    def ruler(self) -> dict[str, float]:
        """GB/s of reading memory (on a GPU: of copying it, both ways counted) and GFLOP/s of a large product."""
        source = torch.ones((64 if self._device.type == "cpu" else 256) << 20, device=self._device)
        target = torch.empty_like(source) if self._device.type == "cuda" else None
        square = self._random(2048, 2048)
        runs: dict[str, Run] = {
            "memory": source.sum if target is None else lambda: target.copy_(source),
            "product": lambda: square @ square,
        }
        seconds = self._times(runs)
        moved = source.nbytes * (1 if target is None else 2)
        return {"GB/s": moved / seconds["memory"] / 1e9, "GFLOP/s": 2 * 2048**3 / seconds["product"] / 1e9}

    @torch.inference_mode()
    def attention(self) -> Iterator[dict[str, Any]]:
        """One layer of a step, the writing of its keys and values included, by each backend of the device."""
        shape = self._shape
        spec = KVCacheSpec(1, shape.num_kv_heads, shape.head_dim)
        rows = backends_of(self._device.type, str(self._dtype).removeprefix("torch."))
        backends = {
            row.name: make_attention_backend(row.name, spec, self._dtype, self._device, self._num_threads)
            for row in rows
        }
        for kind, steps in STEPS.items():
            for num_reqs, seq_len, num_new in steps:
                metadata, num_blocks = self._step(num_reqs, seq_len, num_new)
                cache = self._random(*spec.layer_shape(num_blocks, BLOCK_SIZE))
                num_tokens = num_reqs * num_new
                query = self._random(num_tokens, shape.num_heads, shape.head_dim)
                key, value = self._random(2, num_tokens, shape.num_kv_heads, shape.head_dim).unbind(0)
                plans = {name: backend.plan(metadata) for name, backend in backends.items()}
                runs: dict[str, Run] = {
                    name: partial(plan.forward, query, key, value, cache, shape.head_dim**-0.5)
                    for name, plan in plans.items()
                }
                read = 2 * num_reqs * seq_len * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize
                seen = num_reqs * (num_new * (seq_len - num_new) + num_new * (num_new + 1) // 2)
                sizes = {"requests": num_reqs, "seq_len": seq_len, "new_tokens": num_new}
                yield from self._lines(
                    "attention", kind, sizes, runs, read, 4 * seen * shape.num_heads * shape.head_dim
                )

    @torch.inference_mode()
    def linear(self) -> Iterator[dict[str, Any]]:
        """Each dense layer of a decoder layer, and the head, by each contender."""
        threads = _core.CpuThreads(self._num_threads) if self._device.type == "cpu" else None
        for name, (out_features, in_features) in self._shape.dense_layers.items():
            weight = self._random(out_features, in_features)
            kernels: dict[str, LinearKernel] = {"torch": TorchLinear(weight, None)}
            sizes_of = {"torch": weight.nbytes}
            if threads is not None and OneDnnLinear.is_available(self._dtype):
                kernels["onednn"] = OneDnnLinear(weight, None)
            if threads is not None and self._dtype in CORE_DTYPES:
                kernels["core"] = CoreLinear(threads, weight, None)
                kernels["core int8"] = CoreLinear(threads, weight, None, "int8")
                kernels["core w8a8"] = CoreLinear(threads, weight, None, "w8a8")
            sizes_of |= {contender: kernel.nbytes for contender, kernel in kernels.items() if kernel.nbytes}
            for num_rows in LINEAR_ROWS:
                x = self._random(num_rows, in_features)
                runs: dict[str, Run] = {
                    contender: partial(kernel.forward, x, None, None) for contender, kernel in kernels.items()
                }
                sizes = {"rows": num_rows, "out_features": out_features, "in_features": in_features}
                flops = 2 * num_rows * out_features * in_features
                yield from self._lines("linear", name, sizes, runs, sizes_of, flops)

    @torch.inference_mode()
    def sampler(self) -> Iterator[dict[str, Any]]:
        """One token for each of some rows of logits."""
        sampler = Sampler(CpuDraw(_core.CpuThreads(self._num_threads)) if self._device.type == "cpu" else None)
        for num_rows in SAMPLED_ROWS:
            logits = self._random(num_rows, self._shape.vocab_size).float() * 4
            rows = torch.arange(num_rows, device=self._device)
            ones = torch.ones(num_rows, device=self._device)
            drawn = SamplingMetadata(random_rows=rows, temperature=ones, seeds=rows, positions=rows)
            kinds = {
                "greedy": SamplingMetadata(),
                "temperature": drawn,
                "top_k 50": replace(drawn, filters={"top_k": torch.full_like(rows, 50)}),
                "top_p 0.9": replace(drawn, filters={"top_p": ones * 0.9}),
            }
            runs: dict[str, Run] = {kind: partial(_sample, sampler, logits, case) for kind, case in kinds.items()}
            sizes = {"rows": num_rows, "vocab_size": self._shape.vocab_size}
            yield from self._lines("sampler", "draw", sizes, runs, logits.nbytes, 0)

    def _step(self, num_reqs: int, seq_len: int, num_new: int) -> tuple[AttentionMetadata, int]:
        """A step of equal requests, whose blocks lie in random order; and how many blocks there are."""
        columns = -(-seq_len // BLOCK_SIZE)
        num_blocks = num_reqs * columns + 1
        blocks = np.random.default_rng(0).permutation(num_blocks - 1) + 1
        table = blocks.reshape(num_reqs, columns).astype(np.int32)
        positions = np.arange(seq_len - num_new, seq_len)
        slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        metadata = AttentionMetadata(
            block_size=BLOCK_SIZE,
            block_table=torch.from_numpy(table).to(self._device),
            slot_mapping=torch.from_numpy(slots.reshape(-1).astype(np.int32)).to(self._device),
            query_start_loc=(np.arange(num_reqs + 1) * num_new).astype(np.int32),
            seq_lens=np.full(num_reqs, seq_len, np.int32),
        )
        return metadata, num_blocks

    def _random(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self._generator, device=self._device)
        return numbers.mul_(shape[-1] ** -0.5).to(self._dtype)

    def _lines(
        self,
        kernel: str,
        case: str,
        sizes: Mapping[str, int],
        runs: Mapping[str, Run],
        num_bytes: int | Mapping[str, int],
        flops: int,
    ) -> Iterator[dict[str, Any]]:
        for contender, seconds in self._times(runs).items():
            moved = num_bytes if isinstance(num_bytes, int) else num_bytes[contender]
            line = {"kernel": kernel, "case": case, "contender": contender, **sizes, "ms": 1e3 * seconds}
            line["GB/s"] = moved / seconds / 1e9
            yield line | ({"GFLOP/s": flops / seconds / 1e9} if flops else {})

    def _times(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """The least seconds of each, of ``num_rounds`` turns after one that is not counted."""
        best = dict.fromkeys(runs, float("inf"))
        for turn in range(-1, self._num_rounds):
            for name, run in runs.items():
                seconds = self._timed(run)
                if turn >= 0:
                    best[name] = min(best[name], seconds)
        return best

    def _timed(self, run: Run) -> float:
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # The device is kept busy until the host has launched all of the run; an idle one would time the launches.
            torch.cuda._sleep(LAUNCH_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 -- torch has no other
            begin.record()
            run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        began = time.perf_counter()
        run()
        return time.perf_counter() - began


def _sample(sampler: Sampler, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """A copy goes in: the sampler may write into what it is given."""
    return sampler.sample(logits.clone(), metadata)
