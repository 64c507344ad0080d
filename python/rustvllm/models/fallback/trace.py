"""Finds out how a transformers model uses attention, by running it once on the meta device, which computes nothing.

The model's attention modules get a function from transformers' attention interface, and a mask from its mask makers.
Under the name ``rustvllm`` they get the functions of this file. During a trace these record each layer's shapes and
options, and refuse what paged attention cannot do; afterwards they compute over the paged cache.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.exceptions import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "rustvllm"
"""The name under which our attention is registered with transformers."""
LAYER_ATTRIBUTE = "rustvllm_layer"
"""The attribute of an attention module that has its :class:`PagedLayer`."""
NUM_TRACED_TOKENS = 3

# Options that do not affect the result, or that the plan and the mask determine.
_IGNORED_OPTIONS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "layer_idx", "target_dtype", "softcap"}
    | {"sliding_window", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
    | {"logits_to_keep", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)
_trace: ContextVar[AttentionTrace | None] = ContextVar("rustvllm_attention_trace", default=None)
_registering = threading.Lock()


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shapes and options of one attention layer.

    Attributes:
        module_name: The attention module's name in the model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, and of value heads.
        key_dim: Features of a query or key.
        value_dim: Features of a value.
        sliding_window: How many keys a query sees, including its own; None: all.
        soft_cap: Limit of the scores; None if there is none.
    """

    module_name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None
    soft_cap: float | None


class PagedStep:
    """The step whose attention a model's layers compute; set before a forward pass, and cleared after it."""

    def __init__(self) -> None:
        self.plan: AttentionPlan | None = None
        self.kv_caches: Sequence[Tensor] = ()


class PagedLayer:
    """One attention layer over its own paged cache.

    Args:
        step: The step, shared by all layers of the model.
        index: The index of the layer's cache.
        shape: The layer's shapes and options.
        head_dim: Features per head of the cache; shorter keys or values are padded with zeros.
    """

    def __init__(self, step: PagedStep, index: int, shape: LayerShape, head_dim: int) -> None:
        self._step = step
        self._index = index
        self._shape = shape
        self._key_padding = head_dim - shape.key_dim
        self._value_padding = head_dim - shape.value_dim

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Compute attention.

        Args:
            query: ``[1, num_heads, num_tokens, key_dim]``.
            key: ``[1, num_kv_heads, num_tokens, key_dim]``.
            value: ``[1, num_kv_heads, num_tokens, value_dim]``.
            scaling: Factor on the products; None: ``key_dim ** -0.5``.

        Returns:
            ``[1, num_tokens, num_heads, value_dim]``.

        Raises:
            RuntimeError: The model was called outside a step.
        """
        plan = self._step.plan
        if plan is None:
            raise RuntimeError("a layer of the paged backend was called outside a step")
        shape = self._shape
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, dim]
        if self._key_padding:  # zeros do not change a product
            q, k = nn.functional.pad(q, (0, self._key_padding)), nn.functional.pad(k, (0, self._key_padding))
        if self._value_padding:
            v = nn.functional.pad(v, (0, self._value_padding))
        out = plan.forward(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            self._step.kv_caches[self._index],
            shape.key_dim**-0.5 if scaling is None else scaling,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
        )
        return out[None, :, :, : shape.value_dim]


class AttentionTrace:
    """Records how a model's attention layers use attention.

    Args:
        model: On the meta device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[LayerShape] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._windows: dict[int, int | None] = {}  # the address of a mask's memory -> the mask's window
        self._masks: list[Tensor] = []  # keeps this memory alive

    def make_mask(
        self, mask_function: Callable[..., Any], q_length: int, kv_length: int, local_size: int | None = None
    ) -> Tensor:
        """Make a placeholder for a mask that a model requests from transformers.

        Raises:
            UnreachableAttentionError: The mask is neither causal nor a causal sliding window.
        """
        if not _is_causal(mask_function, local_size):
            raise UnreachableAttentionError(
                "its mask is neither causal nor a causal sliding window"
                + (f" of {local_size}" if local_size is not None else "")
            )
        mask = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool, device="cpu").tril()
        self._masks.append(mask)
        self._windows[mask.untyped_storage().data_ptr()] = local_size
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Record one call of the attention interface.

        Raises:
            UnreachableAttentionError: The call needs something that paged attention cannot do.
        """
        name = self._names.get(id(module), type(module).__name__)
        if any(layer.module_name == name for layer in self.layers):
            raise UnreachableAttentionError(f"{name} attends more than once per token")
        strange = sorted(option for option, value in options.items() if _asks(option, value))
        if strange:
            raise UnreachableAttentionError(f"{name} asks attention for {', '.join(strange)}")
        if not isinstance(mask, Tensor) or mask.device.type != "cpu":
            raise UnreachableAttentionError(f"{name} makes its own attention mask")
        window = self._windows.get(mask.untyped_storage().data_ptr(), -1)
        if window == -1:
            raise UnreachableAttentionError(f"{name} makes its own attention mask")
        batch, num_heads, num_tokens, key_dim = query.shape
        num_kv_heads, value_dim = key.shape[1], value.shape[3]
        expected_key = (1, num_kv_heads, NUM_TRACED_TOKENS, key_dim)
        if (
            (batch, num_tokens) != (1, NUM_TRACED_TOKENS)
            or tuple(key.shape) != expected_key
            or tuple(value.shape) != (*expected_key[:3], value_dim)
            or num_heads % num_kv_heads
        ):
            raise UnreachableAttentionError(
                f"{name} attends with shapes {list(query.shape)}, {list(key.shape)} and {list(value.shape)}, but the "
                "shapes must be those of a step's tokens and their heads"
            )
        soft_cap = options.get("softcap")
        self.layers.append(
            LayerShape(
                name, num_heads, num_kv_heads, key_dim, value_dim, window, None if soft_cap is None else float(soft_cap)
            )
        )
        return query.new_empty((1, num_tokens, num_heads, value_dim))


class UnreachableAttentionError(ModelLoadError):
    """The paged cache cannot serve a model's attention; the message is a clause that says why."""


@contextmanager
def trace_attention(model: PreTrainedModel) -> Iterator[AttentionTrace]:
    """Record the use of attention inside the block, in this thread."""
    from transformers import AttentionMaskInterface

    trace = AttentionTrace(model)
    with _registering:
        # Registered only during a trace: otherwise there is no mask function of this name, so no mask is made.
        AttentionMaskInterface.register(ATTENTION_NAME, _make_mask)
        token = _trace.set(trace)
        try:
            yield trace
        finally:
            _trace.reset(token)
            AttentionMaskInterface._global_mapping.pop(ATTENTION_NAME, None)  # noqa: SLF001 -- it has no unregister


def register_attention() -> None:
    """Register our attention with transformers; a second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    layer = getattr(module, LAYER_ATTRIBUTE, None)
    if isinstance(layer, PagedLayer):
        return layer.forward(query, key, value, scaling), None
    trace = _trace.get()
    if trace is None:
        raise RuntimeError(f"{type(module).__name__} has no paged layer, and nothing is being traced")
    return trace.attend(module, query, key, value, attention_mask, options), None


def _make_mask(
    mask_function: Callable[..., Any],
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    **_: Any,
) -> Tensor | None:
    trace = _trace.get()
    return None if trace is None else trace.make_mask(mask_function, int(q_length), int(kv_length), local_size)


def _asks(option: str, value: Any) -> bool:
    """Whether a layer passes an option to attention that the plan cannot handle."""
    return option not in _IGNORED_OPTIONS and value is not None and value is not False


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask function lets a query see itself and earlier keys, within the window; found by sampling."""
    corners = [2**k for k in range(20)] + [k * (window or 1) for k in (1, 2, 3)]
    positions = {corner + i for corner, i in itertools.product(corners, (-2, -1, 0, 1, 2))}
    index = torch.tensor(sorted(position for position in positions if position >= 0), device="cpu")
    query, key = index[:, None], index[None, :]
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        visible = torch.as_tensor(mask_function(zero, zero, query, key), device="cpu")
    except Exception:  # noqa: BLE001 -- a model's own function may expect other arguments
        return False
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    return visible.dtype == torch.bool and torch.equal(visible.expand(expected.shape), expected)
