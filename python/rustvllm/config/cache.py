"""``CacheConfig``: the KV cache, its blocks, and the hash that names a cached block."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rustvllm.config.ranges import require_choice, require_fraction, require_int, require_number

KV_CACHE_DTYPES = ("auto", "bfloat16", "int8_per_token_head", "fp8", "fp8_e4m3")
"""What the KV cache holds: numbers of the model's dtype, bfloat16, whole numbers of eight bits with a scale for each
token and head, or e4m3 (both names)."""
INT8_SCALE_BYTES = 4
"""Bytes of the float32 scale that follows a head's features in eight bits."""
MAX_SWAP_SPACE = 1 << 20
"""GiB: more than any machine has, and few enough for a size in bytes to be exact."""
HashAlgorithm = Literal["siphash13", "sha256"]
"""Hash functions that name a cached block: 128 bits, with a secret key of the process."""
PREFIX_CACHING_HASH_ALGOS: Mapping[str, HashAlgorithm] = MappingProxyType(
    {
        "builtin": "siphash13",
        "sha256": "sha256",
        "sha256_cbor": "sha256",  # the names with _cbor differ in how vLLM writes down what is hashed
        # xxHash has no secret: a client that guesses its seed can make two prompts collide and get another's blocks.
        "xxhash": "siphash13",
        "xxhash_cbor": "siphash13",
    }
)
"""vLLM's names of hash functions, and the function that each selects."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache: size of a block and how many there are.

    The number of blocks is ``num_gpu_blocks_override`` when given, else what fits into ``kv_cache_memory_bytes`` when
    given, else a fraction of the memory: of the GPU's (``gpu_memory_utilization``, weights included) or of the
    container's memory limit on the CPU (``cpu_kv_cache_fraction``, the KV cache alone).

    ``prefix_caching_hash_algo`` is a name out of ``PREFIX_CACHING_HASH_ALGOS``; ``hash_algorithm`` is what runs for it.

    ``swap_space`` is the CPU memory, in GiB, for the KV of preempted requests. It is taken only when preemption is by
    swap.

    ``kv_cache_dtype`` is a name out of ``KV_CACHE_DTYPES``.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_fraction: float = 0.2
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "builtin"
    swap_space: float = 4.0
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        require_number("swap_space", self.swap_space, 0, MAX_SWAP_SPACE)
        require_choice("prefix_caching_hash_algo", self.prefix_caching_hash_algo, tuple(PREFIX_CACHING_HASH_ALGOS))
        require_int("block_size", self.block_size, 1, 1024)
        require_fraction("gpu_memory_utilization", self.gpu_memory_utilization)
        require_fraction("cpu_kv_cache_fraction", self.cpu_kv_cache_fraction)
        if self.kv_cache_memory_bytes is not None:
            require_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.num_gpu_blocks_override is not None:
            # One block is the null block, which holds no tokens.
            require_int("num_gpu_blocks_override", self.num_gpu_blocks_override, 2, 2**31 - 1)

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds numbers of eight bits."""
        return self.kv_cache_dtype.startswith("fp8")

    @property
    def hash_algorithm(self) -> HashAlgorithm:
        """The function that names cached blocks."""
        return PREFIX_CACHING_HASH_ALGOS[self.prefix_caching_hash_algo]
