"""Custom logits processors: the interface of processor classes, which is vLLM's, and how they are loaded.

A class is loaded with the engine (``--logits-processors module:Class``) and sees the logits of every step. The rows of
a step are places in a batch, 0 to ``batch_size`` − 1. ``update_state`` says how the batch differs from the previous
one: which requests left, came, or moved to another place. A request that is not sampled in a step, because it waits for
memory or for its turn, leaves the batch, and comes again with the tokens it has by then.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from rustvllm.exceptions import ConfigError

if TYPE_CHECKING:
    from typing import Any

    import torch
    from torch import Tensor

    from rustvllm.config import EngineConfig
    from rustvllm.sampling_params import SamplingParams


class MoveDirectionality(Enum):
    """How a move affects two places of the batch."""

    UNIDIRECTIONAL = auto()
    """The request at the first place moves to the second, which is empty; then the first is empty."""
    SWAP = auto()
    """The requests at both places are exchanged."""


AddedRequest = tuple[int, "SamplingParams", list[int], list[int]]
"""Place, parameters, prompt ids, and output ids: the actual list, which grows with each token."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How a step's batch differs from the previous one; apply the changes in the order of the attributes.

    Attributes:
        batch_size: Requests that are in the batch now.
        removed: Places whose requests left, and that stay empty.
        added: Requests that came; a request at an occupied place replaces the one there.
        moved: Moves and swaps of places, one after the other.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes the logits of all rows of a step at once.

    It gets the parameters that matter for sampling. ``n``, ``max_tokens``, ``stop`` and other parameters that the front
    end handles have their defaults. Custom arguments are in ``extra_args`` (``vllm_xargs`` over HTTP).
    """

    @classmethod  # noqa: B027 -- most processors refuse nothing
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ``ValueError`` to refuse a request with wrong arguments; the client gets the message."""

    @abstractmethod
    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Called once, when the engine loads its model.

        Args:
            config: The engine's configuration.
            device: The device of the logits.
            is_pin_memory: Whether tensors that are sent to the device should be pinned.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the likeliest token of a row always stays the likeliest.

        Then the processor is applied after the temperature, and only in steps with a row that is not greedy; else it is
        applied before the temperature, in every step.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called once per step before :meth:`apply`; None if the batch did not change."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change the logits.

        Args:
            logits: float32 ``[batch_size, vocab_size]``; may be changed in place.

        Returns:
            The logits, of the same shape.
        """


def load_logits_processors(
    names: Sequence[str | type[Any]], config: EngineConfig, device: torch.device
) -> list[LogitsProcessor]:
    """Import the classes and make one instance of each.

    Args:
        names: ``module:Class``, or the classes themselves.
        config: The engine's configuration.
        device: The device of the logits.

    Raises:
        ConfigError: A class cannot be imported or instantiated, or is not a :class:`LogitsProcessor`; the message names
            it and says why.
    """
    return [_make(_find(name) if isinstance(name, str) else name, name, config, device) for name in names]


def _find(name: str) -> object:
    module_name, colon, path = name.partition(":")
    if not module_name or not colon or not path:
        raise ConfigError(f"logits_processors: {name!r} does not have the form module:Class")
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"logits_processors: {name!r} cannot be imported: {type(error).__name__}: {error}; the module must be on "
            "the Python path of the engine"
        ) from error
    return found


def _make(found: object, name: object, config: EngineConfig, device: torch.device) -> LogitsProcessor:
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"logits_processors: {name!r} must be a subclass of rustvllm.LogitsProcessor, got {found!r}")
    try:
        processor = found(config, device, device.type == "cuda")
        is_invariant = processor.is_argmax_invariant()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"logits_processors: {name!r} cannot be created: {type(error).__name__}: {error}") from error
    if not isinstance(is_invariant, bool):
        raise ConfigError(
            f"logits_processors: is_argmax_invariant of {name!r} must return True or False, got {is_invariant!r:.80}"
        )
    return processor
