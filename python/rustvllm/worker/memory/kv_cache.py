"""Decides how many blocks the KV cache gets: from which memory, and how much stays free for the largest step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rustvllm.config.byte_sizes import readable_size
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.worker import host_resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from rustvllm.config import EngineConfig, ModelConfig, SchedulerConfig

logger = init_logger(__name__)

MAX_SLOTS = 2**31 - 1
"""A slot number has 32 bits."""
MAX_CPU_BLOCKS = 2**27
"""The most blocks in CPU memory that the core can number."""
CPU_CACHE_CAP = 4
"""On the CPU the default cache holds at most this many times what ``max_num_seqs`` sequences of full length need."""
CPU_CACHE_SHARE_OF_AVAILABLE = 0.9
"""The most that the default CPU cache takes of the memory that is free now."""
SPARE_BYTES = 32 << 20
"""Memory for requests, their texts and what allocators keep, in the engine and in its front ends."""
_HIDDEN_COPIES, _INNER_COPIES, _LOGITS_COPIES = 6, 2, 3
"""How many tensors exist at a time: stream, norm, query, key, value and output of a layer; input and output of its
activation; logits, the sampler's copy of them, and their order."""


def step_bytes(model: ModelConfig, scheduler: SchedulerConfig, itemsize: int) -> int:
    """Memory of the largest step, with the most tokens and the most requests.

    Args:
        model: The model's configuration, for its sizes.
        scheduler: The scheduler's configuration, for its limits.
        itemsize: Bytes of a number.
    """
    inner = next(filter(None, map(model.hf_config.get, ("intermediate_size", "n_inner", "ffn_dim"))), None)
    width = inner if isinstance(inner, int) else 4 * model.hidden_size
    per_token = (_HIDDEN_COPIES * model.hidden_size + _INNER_COPIES * width) * itemsize
    logits = _LOGITS_COPIES * scheduler.max_num_seqs * model.vocab_size * 4
    return scheduler.max_num_batched_tokens * per_token + logits + SPARE_BYTES


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated on a device now."""
    if device.type == "cpu":
        return host_resources.memory_available()
    return torch.cuda.mem_get_info(device)[0]


class KVCacheMemory:
    """See the module.

    Args:
        config: The engine's configuration.
        device: Where the cache will lie.
        itemsize: Bytes of one of the model's numbers.
        bytes_per_block: Bytes of one KV block over all layers.
    """

    def __init__(self, config: EngineConfig, device: torch.device, itemsize: int, bytes_per_block: int) -> None:
        self.config = config
        self.device = device
        self.itemsize = itemsize
        self.bytes_per_block = bytes_per_block

    def num_blocks(self, cuda_budget: Callable[[], int]) -> int:
        """The number of KV blocks, including the null block.

        This is the override if given, else what fits into ``kv_cache_memory_bytes`` if given, else a share of the
        memory: on the CPU ``cpu_kv_cache_fraction`` of the container's limit, at most what is free now and at most
        ``CPU_CACHE_CAP``; on CUDA what ``gpu_memory_utilization`` leaves after the weights and the largest step.

        Args:
            cuda_budget: Measures how many bytes a CUDA device has left.

        Raises:
            ModelLoadError: Not even one usable block fits, or the configuration asks for more than there is.
        """
        cache = self.config.cache
        per_block = self.bytes_per_block
        most = MAX_SLOTS // cache.block_size
        if cache.num_gpu_blocks_override is not None:
            num_blocks = cache.num_gpu_blocks_override
            if num_blocks > most:
                raise ModelLoadError(f"num_gpu_blocks_override is {num_blocks}, but the limit is {most} blocks")
            self._check_room(num_blocks * per_block, "num_gpu_blocks_override", num_blocks, per_block)
            self._warn_of_tight_memory(num_blocks * per_block)
            return num_blocks
        if cache.kv_cache_memory_bytes is not None:
            self._check_room(cache.kv_cache_memory_bytes, "kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 1)
            budget = cache.kv_cache_memory_bytes
        elif self.device.type == "cpu":
            budget = self._cpu_budget()
        else:
            budget = cuda_budget()
        num_blocks = min(budget // per_block, most)
        if num_blocks < 2:
            share = "cpu_kv_cache_fraction" if self.device.type == "cpu" else "gpu_memory_utilization"
            raise ModelLoadError(
                f"the KV cache has {readable_size(budget)}, but two blocks of {cache.block_size} tokens need "
                f"{readable_size(2 * per_block)} ({2 * per_block} bytes); "
                f"raise kv_cache_memory_bytes or {share}, or lower block_size"
            )
        self._warn_of_tight_memory(num_blocks * per_block)
        return int(num_blocks)

    def num_cpu_blocks(self, num_blocks: int) -> int:
        """Blocks in CPU memory for preempted requests: as many as fit ``swap_space``; 0 unless preemption swaps.

        Args:
            num_blocks: KV blocks of the device, whose memory is not allocated yet.

        Raises:
            ConfigError: ``swap_space`` is less than one block, or more than there is.
        """
        if self.config.scheduler.preemption_mode != "swap":
            return 0
        per_block = self.bytes_per_block
        swap_space = self.config.cache.swap_space
        fitting = min(int(swap_space * 2**30) // per_block, MAX_CPU_BLOCKS)
        if fitting == 0:
            raise ConfigError(
                f"swap_space is {swap_space:g} GiB, but one KV block takes {per_block} bytes: set it to at least "
                f"{_gib(per_block, up=True)}, or preemption_mode to recompute"
            )
        available = host_resources.memory_available()
        if self.device.type == "cpu":
            available -= num_blocks * per_block
        if fitting * per_block > available:
            advice = f"set it to {_gib(available)} or less" if available >= per_block else "free some"
            raise ConfigError(
                f"swap_space is {swap_space:g} GiB, but {max(available, 0) / 2**30:.2f} GiB of CPU memory are free"
                f"{' after the KV cache' if self.device.type == 'cpu' else ''}: {advice}, or set preemption_mode to "
                "recompute"
            )
        return fitting

    def _check_room(self, needed: int, name: str, value: int, unit: int) -> None:
        available = available_memory(self.device)
        if needed > available:
            raise ModelLoadError(
                f"{name} is {value}, which needs {readable_size(needed)}, but only {readable_size(available)} are free "
                f"on {self.device}; set it to {available // unit} or less"
            )

    def _warn_of_tight_memory(self, cache_bytes: int) -> None:
        """Warn if the KV cache leaves less than the largest step may need: the engine may be killed under load."""
        if self.device.type != "cpu":
            return
        available, step = host_resources.memory_available(), self._step_bytes()
        if cache_bytes + step > available:
            scheduler = self.config.scheduler
            logger.warning(
                "memory is tight: %d MiB are free, the KV cache takes %d and the largest step about %d, so the system "
                "may kill the engine under load. Lower kv_cache_memory_bytes (to %d, for example), "
                "max_num_batched_tokens (%d) or max_num_seqs (%d), use quantization int8, or give the engine more "
                "memory",
                *(available >> 20, cache_bytes >> 20, step >> 20, max(0, available - step)),
                *(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            )

    def _step_bytes(self) -> int:
        return step_bytes(self.config.model, self.config.scheduler, self.itemsize)

    def _cpu_budget(self) -> int:
        limit, available = host_resources.memory_limit(), host_resources.memory_available()
        share = int(min(self.config.cache.cpu_kv_cache_fraction * limit, CPU_CACHE_SHARE_OF_AVAILABLE * available))
        # Leave room for the largest step, if there is any, so that load does not end the engine.
        if self._step_bytes() < available:
            share = min(share, available - self._step_bytes())
        share //= self.config.parallel.num_sharers  # the machine's other engines and ranks take as much
        blocks_per_seq = -(-self.config.model.max_model_len // self.config.cache.block_size)
        useful = 1 + CPU_CACHE_CAP * self.config.scheduler.max_num_seqs * blocks_per_seq
        return min(share, useful * self.bytes_per_block)


def _gib(num_bytes: int, *, up: bool = False) -> str:
    """A size as a value for ``swap_space``: in GiB with as many digits as it needs, rounded down or up."""
    for digits in (2, 4, 6, 9):
        unit = 10**digits
        scaled = -(-num_bytes * unit // 2**30) if up else num_bytes * unit // 2**30
        if scaled >= 100:
            return f"{scaled / unit:.{digits}f}".rstrip("0").rstrip(".")
    return f"{num_bytes / 2**30:g}"
