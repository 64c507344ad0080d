"""``ParallelConfig``: how many ranks share a model, how many engines a machine, and whether a model can be split."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rustvllm.exceptions import ConfigError

MAX_RANKS: Final = 64
"""The most processes that can share one model, a limit of the step channel."""
MAX_DATA_PARALLEL_SIZE: Final = 64
EXECUTOR_BACKENDS: Final = ("uni", "mp", "ray")
DEFAULT_MASTER_ADDR: Final = "127.0.0.1"
DEFAULT_MASTER_PORT: Final = 29501
DEFAULT_STALL_TIMEOUT_SECONDS: Final = 60.0
_LAST_PORT: Final = 65535
_CHANNEL_SLOTS: Final = 16
"""Steps that fit into the channel to the other ranks; one more would wait for a rank that waits for this one."""
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers")
_MLP_WIDTHS: Final = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
_REFUSED_BACKENDS: Final = {
    "external_launcher": "rustvllm starts all ranks itself",
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks share one model, and how many engines share the machine.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Groups of layers, each of ranks of its own.
        data_parallel_size: Engines on this machine, each with the whole model; they divide its processors.
        nnodes: Machines that hold one model together, each as many ranks.
        node_rank: Which of them this is; 0 is the head, whose engine decides.
        master_addr: Where the head listens for the others: a name or an address of its own.
        master_port: Likewise.
        distributed_executor_backend: ``uni``: one rank, in the engine's process; ``mp``: the others in processes of
            these machines; ``ray``: the others where Ray places them; None: whichever the number of ranks needs.
        distributed_timeout_seconds: How long a rank may wait for another; None: as torch has it.
        stall_timeout: Seconds without progress after which the ranks that are behind are named; 0: never.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = DEFAULT_MASTER_ADDR
    master_port: int = DEFAULT_MASTER_PORT
    distributed_executor_backend: str | None = None
    distributed_timeout_seconds: float | None = None
    stall_timeout: float = DEFAULT_STALL_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        limits = {
            "tensor_parallel_size": MAX_RANKS,
            "pipeline_parallel_size": MAX_RANKS,
            "data_parallel_size": MAX_DATA_PARALLEL_SIZE,
            "nnodes": MAX_RANKS,
            "node_rank": MAX_RANKS - 1,
            "master_port": _LAST_PORT,
        }
        for name, limit in limits.items():
            value, least = getattr(self, name), 0 if name == "node_rank" else 1
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
            if value > limit:
                raise ConfigError(f"{name} must be at most {limit}, got {value}")
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} times pipeline_parallel_size "
                f"{self.pipeline_parallel_size} is {self.num_ranks} ranks, but at most {MAX_RANKS} can share one "
                "model: lower one of them"
            )
        self._check_nodes()
        self._check_backend()
        timeout: Any = self.distributed_timeout_seconds
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 1 <= timeout <= 86400
        ):
            raise ConfigError(f"distributed_timeout_seconds must be between 1 and 86400 seconds, got {timeout!r}")

    def _check_nodes(self) -> None:
        address: Any = self.master_addr
        if not isinstance(address, str) or not address:
            raise ConfigError(f"master_addr must be the host name or address of the head node, got {address!r}")
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"nnodes {self.nnodes} does not divide the {self.num_ranks} ranks (tensor_parallel_size "
                f"{self.tensor_parallel_size} times pipeline_parallel_size {self.pipeline_parallel_size}); "
                f"{_divisors(self.num_ranks)}"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank is {self.node_rank}, but nnodes is {self.nnodes}: node ranks are 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"nnodes {self.nnodes} and data_parallel_size {self.data_parallel_size} contradict each other: leave "
                "one out, or start each engine of several nodes by itself and name it with --engine-address"
            )

    def _check_backend(self) -> None:
        backend: Any = self.distributed_executor_backend
        if backend is None:
            return
        if not isinstance(backend, str):
            raise ConfigError(
                f"distributed_executor_backend must be one of {', '.join(EXECUTOR_BACKENDS)}, got {backend!r}; "
                "rustvllm does not accept executor classes"
            )
        if (reason := _REFUSED_BACKENDS.get(backend)) is not None:
            raise ConfigError(f"distributed_executor_backend={backend!r} is not supported yet: {reason}; mp works")
        if backend not in EXECUTOR_BACKENDS:
            raise ConfigError(
                f"distributed_executor_backend must be one of {', '.join(EXECUTOR_BACKENDS)}, got {backend!r}"
            )
        if backend == "ray" and self.nnodes > 1:
            raise ConfigError(
                f"distributed_executor_backend is ray, and Ray chooses the machines, but nnodes is {self.nnodes}: "
                "leave nnodes out, or set the backend to mp"
            )
        if backend == "uni" and self.num_ranks > 1:
            size = "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
            raise ConfigError(
                f"distributed_executor_backend is uni, which runs one rank, but {size} is {getattr(self, size)}: set "
                "it to mp, or leave it out"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that share one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks that each machine has; Ray gives each its devices, as if it were alone."""
        return 1 if self.distributed_executor_backend == "ray" else self.num_ranks // self.nnodes

    @property
    def num_sharers(self) -> int:
        """Processes of this machine that divide its processors and its memory among them."""
        is_placed = self.distributed_executor_backend == "ray"  # several may be on one machine
        return self.data_parallel_size * (self.num_ranks if is_placed else self.ranks_per_node)

    @property
    def steps_ahead(self) -> int:
        """Steps that run at the same time in different stages: as many as those, as far as the step channel goes."""
        return min(self.pipeline_parallel_size, _CHANNEL_SLOTS)


def check_split(size: int, num_heads: int, num_kv_heads: int, hf_config: Mapping[str, Any]) -> None:
    """Refuse a model that cannot be split equally across this many ranks.

    The vocabulary can have any size, because it is padded.

    Args:
        size: Ranks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; fewer than ranks are held by several each.
        hf_config: The model's ``config.json``, which says how wide its MLP is.

    Raises:
        ConfigError: Names the two numbers and the sizes that would work.
    """
    if num_heads % size:
        raise ConfigError(f"{_asked(size)} does not divide the {num_heads} attention heads; {_divisors(num_heads)}")
    if num_kv_heads % size and size % num_kv_heads:
        fitting = [
            n for n in range(1, num_heads + 1) if not num_heads % n and not (num_kv_heads % n and n % num_kv_heads)
        ]
        raise ConfigError(
            f"{_asked(size)} and the {num_kv_heads} key and value heads do not match: one number must divide the "
            f"other; {', '.join(map(str, fitting))} would work"
        )
    width = next((hf_config[name] for name in _MLP_WIDTHS if isinstance(hf_config.get(name), int)), None)
    if width is not None and width % size:
        fitting = [n for n in range(1, num_heads + 1) if not math.gcd(num_heads, width) % n]
        raise ConfigError(
            f"{_asked(size)} does not divide the width of the MLP, {width}; {', '.join(map(str, fitting))} would work"
        )


def check_stages(size: int, hf_config: Mapping[str, Any]) -> None:
    """Refuse more stages than a model has layers.

    Args:
        size: Stages.
        hf_config: The model's ``config.json``, which says how many layers it has.

    Raises:
        ConfigError: Names both numbers.
    """
    num_layers = next((hf_config[name] for name in _LAYERS if isinstance(hf_config.get(name), int)), None)
    if num_layers is not None and size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {size} (--pipeline-parallel-size, -pp) is more than the {num_layers} layers of "
            f"this model; at most {num_layers} would work"
        )


def _asked(size: int) -> str:
    return f"tensor_parallel_size {size} (--tensor-parallel-size, -tp)"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if not number % n) + " would"
