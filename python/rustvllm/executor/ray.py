"""``RayPlacement``: ranks on machines that Ray chooses. Ray also watches them and gives addresses; no step passes Ray.

To the head, each rank but the first is a separate node: an actor runs a ``FollowerNode``, which starts the rank's
process and connects to the head with a secret made for this start. The first rank is the engine's process; its place is
only reserved, so that nothing else gets its processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rustvllm.distributed.facts import node_facts
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.process.config_json import build, plain

if TYPE_CHECKING:
    from rustvllm.config import EngineConfig, ParallelConfig

logger = init_logger(__name__)

PLACE_SECONDS = 60.0
"""How long Ray may take to find places."""
_CPUS_OF_A_RANK = 1


class RayPlacement:
    """Asks Ray for one place per rank when it is made.

    Args:
        config: The engine's configuration.
        seconds: How long to wait for places; None: a minute.

    Attributes:
        secret: The secret that each rank's node must know.
        parallel: The head's view of the ranks, in which each is a node.

    Raises:
        ConfigError: Ray is not installed, or the device is not the CPU.
        ModelLoadError: The cluster has no room; the message has the wanted and the available resources.
    """

    def __init__(self, config: EngineConfig, seconds: float | None = None) -> None:
        if config.device.device != "cpu":
            raise ConfigError(
                "distributed_executor_backend is ray, which so far only places ranks on CPUs, but device is "
                f"{config.device.device}: set the backend to mp, or device to cpu"
            )
        seconds = PLACE_SECONDS if seconds is None else seconds
        self._ray: Any = _import()
        self._config = config
        self.secret = secrets.token_bytes(32)
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=True, configure_logging=False)
        host = self._ray.util.get_node_ip_address()
        size = config.parallel.num_ranks
        self.parallel: ParallelConfig = dataclasses.replace(
            config.parallel, distributed_executor_backend="mp", nnodes=size, master_addr=host
        )
        self._actors: list[Any] = []
        bundles = [{"CPU": _CPUS_OF_A_RANK}] * size
        self._group = self._ray.util.placement_group(bundles, strategy="PACK")
        ready, _ = self._ray.wait([self._group.ready()], timeout=seconds)
        if not ready:
            has, free = self._ray.cluster_resources(), self._ray.available_resources()
            self.close()
            raise ModelLoadError(
                f"Ray found no place for {size} ranks of {_CPUS_OF_A_RANK} CPU each within {seconds:g} s: the cluster "
                f"has {_counts(has)}, of which {_counts(free)} are free; ask for fewer ranks, or add nodes"
            )

    def start(self, port: int) -> None:
        """Start the ranks, which connect to the head at ``port``."""
        strategies = self._ray.util.scheduling_strategies
        kind = self._ray.remote(NodeActor)
        for rank in range(1, self.parallel.nnodes):
            strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            actor = kind.options(num_cpus=_CPUS_OF_A_RANK, scheduling_strategy=strategy, max_restarts=0).remote()
            own = dataclasses.replace(self.parallel, node_rank=rank, master_port=port)
            actor.run.remote(plain(dataclasses.replace(self._config, parallel=own)), self.secret)
            self._actors.append(actor)

    def close(self) -> None:
        """Stop the actors and give the places back."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)


class NodeActor:
    """The actor that Ray runs in a place: a node with one rank."""

    def run(self, config: Mapping[str, Any], secret: bytes) -> None:
        """Follow the head until it ends."""
        from rustvllm.config import EngineConfig
        from rustvllm.executor.follower_node import FollowerNode

        own = build(EngineConfig, config)
        FollowerNode(own, node_facts(own), secret, logger.info).run(PLACE_SECONDS)


def _import() -> Any:
    try:
        ray = importlib.import_module("ray")
        for name in ("ray.util", "ray.util.scheduling_strategies"):
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"distributed_executor_backend is ray, but Ray cannot be imported ({error}): pip install "
            "'rustvllm[ray]', or set the backend to mp"
        ) from error
    return ray


def _counts(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs of a cluster, in words."""
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
