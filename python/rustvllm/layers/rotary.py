"""Rotary position embeddings: the frequencies of each scaling type, and the rotation itself.

Each pair of features ``(i, i + d/2)`` in the first ``d`` features of a head is rotated by ``position · inv_freq[i]``
radians; features beyond ``d`` stay unchanged (partial rotary). The scaling types change ``inv_freq``, and yarn and
longrope also the length of the rotated vector.

A token's keys are computed once, so its frequencies must not change while its request grows, nor depend on other
requests. Two types define frequencies that depend on the length of the sequence; here ``max_model_len`` decides once:

- dynamic: the plain frequencies up to ``max_position_embeddings``, else those of a sequence of ``max_model_len``;
- longrope: the short factors up to ``original_max_position_embeddings``, else the long ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rustvllm.config.rope import check_rope, scaling_number
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.fused import runs_fused, runs_fused_on

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
NUM_AXES = 3
"""Parts of a position of a model that sees images in place: temporal, height, width."""
_TYPES_WITH_TRAINED_LENGTH = ("llama3", "yarn", "longrope")


class RotaryEmbedding:
    """Cosines and sines for the positions of a step, computed once per step and shared by all layers.

    Attributes:
        inv_freq: float32 ``[rotary_dim / 2]``, radians per position.
        attention_scaling: Factor on the rotated vectors (1 except for yarn and longrope).
        max_model_len: The longest sequence; None: unlimited.
        axes: int64 ``[rotary_dim / 2]``: which part of a position rotates each pair, if a position may have three parts
            (temporal, height, width); None: positions have one part.
    """

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0, max_model_len: int | None = None) -> None:
        self.inv_freq = inv_freq
        self.attention_scaling = attention_scaling
        self.max_model_len = max_model_len
        self.axes: Tensor | None = None
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        # Factors on the position, for both halves of a head's rotated features.
        self._frequencies = torch.cat((inv_freq, inv_freq))
        self._sine_signs = torch.cat((-torch.ones_like(inv_freq), torch.ones_like(inv_freq))) * attention_scaling

    @classmethod
    def from_config(
        cls,
        hf_config: Mapping[str, Any],
        head_dim: int,
        max_model_len: int,
        *,
        partial: bool = False,
        layer_type: str | None = None,
    ) -> RotaryEmbedding:
        """Read ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``.

        Args:
            hf_config: The parsed ``config.json``.
            head_dim: Features of a head.
            max_model_len: The longest sequence that will be served.
            partial: Whether the architecture allows rotating only a part of each head (``partial_rotary_factor``).
            layer_type: The type of layer, if ``rope_parameters`` has an entry for each type.

        Raises:
            ModelLoadError: The type is unknown, a key is missing, or a value is out of range.
        """
        parameters = rope_parameters(hf_config, layer_type)
        rotary_dim = _rotary_dim(parameters, head_dim, partial=partial)
        return cls(*_frequencies(parameters, hf_config, rotary_dim, max_model_len), max_model_len)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """The angles of a step, for its layers; computed when a layer first needs them."""
        return RotaryAngles(self, positions, dtype)

    def table(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Cosines and sines of all positions, computed once: ``[max_model_len, rotary_dim]``, the cosines first.

        None if no kernel reads the table, or if the length is unlimited.
        """
        if self.max_model_len is None or not runs_fused_on(device):
            return None
        if (device, dtype) not in self._tables:
            cos, sin = self.cos_sin(torch.arange(self.max_model_len, dtype=torch.int32, device=device), dtype)
            half = cos.shape[-1] // 2
            self._tables[device, dtype] = torch.cat((cos[:, 0, half:], sin[:, 0, half:]), dim=-1)
        return self._tables[device, dtype]

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles.

        Args:
            positions: int ``[num_tokens]``, or ``[3, num_tokens]`` with ``axes``.
            dtype: The dtype of the result.

        Returns:
            Two tensors ``[num_tokens, 1, rotary_dim]``, which broadcast over heads; the sine's first half is negated.
        """
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
            self._sine_signs = self._sine_signs.to(positions.device)
        if positions.dim() == 2 and self.axes is not None:
            of_pairs = positions[self.axes].t()  # [T, d / 2]
            angles = (torch.cat((of_pairs, of_pairs), dim=-1) * self._frequencies)[:, None]  # float32 [T, 1, d]
        else:
            angles = positions[:, None, None] * self._frequencies  # float32 [T, 1, d]
        cos, sin = angles.cos(), angles.sin() * self._sine_signs
        if self.attention_scaling != 1.0:
            cos *= self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


class RotaryAngles:
    """The angles of one step's tokens, in the form that a layer needs.

    Args:
        embedding: The rotary embedding of the layers.
        positions: int32 ``[num_tokens]``, or ``[3, num_tokens]``; see ``RotaryEmbedding.cos_sin``.
        dtype: The dtype of cosines and sines.
    """

    def __init__(self, embedding: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> None:
        self.positions = positions
        self._embedding = embedding
        self._dtype = dtype
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    @property
    def table(self) -> Tensor | None:
        """See ``RotaryEmbedding.table``."""
        return self._embedding.table(self.positions.device, self._dtype)

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """See ``RotaryEmbedding.cos_sin``; computed when a layer first needs them."""
        if self._cos_sin is None:
            self._cos_sin = self._embedding.cos_sin(self.positions, self._dtype)
        return self._cos_sin


def section_axes(sections: object, num_pairs: int, *, interleaved: bool) -> Tensor:
    """Which part of a three-part position rotates each pair of features (``mrope_section``).

    Args:
        sections: How many pairs each part rotates; three integers.
        num_pairs: All pairs of a head, the sum of ``sections``.
        interleaved: Whether the parts take turns pair by pair; otherwise each has its pairs side by side.

    Returns:
        int64 ``[num_pairs]``: 0 (temporal), 1 (height) or 2 (width).

    Raises:
        ModelLoadError: ``sections`` are not three numbers with that sum.
    """
    counts = [*sections] if isinstance(sections, list | tuple) else []
    are_counts = len(counts) == NUM_AXES and all(type(count) is int and count >= 0 for count in counts)
    if not are_counts or sum(counts) != num_pairs:
        raise ModelLoadError(
            f"config.json: mrope_section must be {NUM_AXES} integers whose sum is {num_pairs}, half the features of a "
            f"head, got {sections!r:.80}"
        )
    if not interleaved:
        return torch.arange(NUM_AXES, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    axes = torch.zeros(num_pairs, dtype=torch.int64, device="cpu")
    for axis in range(1, NUM_AXES):
        axes[axis : NUM_AXES * counts[axis] : NUM_AXES] = axis
    return axes


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of every head's first ``rotary_dim`` features.

    Args:
        x: ``[num_tokens, num_heads, head_dim]``.
        cos: ``[num_tokens, 1, rotary_dim]``, from ``cos_sin``.
        sin: ``[num_tokens, 1, rotary_dim]``, from ``cos_sin``.

    Returns:
        A new tensor shaped like ``x``.
    """
    rotary_dim = cos.shape[-1]
    if runs_fused(x):
        from rustvllm.kernels.rotary import rotary

        return rotary(x, cos[:, 0, rotary_dim // 2 :], sin[:, 0, rotary_dim // 2 :])
    if rotary_dim < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, dims=-1), sin)


def rope_parameters(hf_config: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """The rope settings, under one set of names for both spellings.

    Args:
        hf_config: The parsed ``config.json``.
        layer_type: The type of layer, if there are settings for each type.

    Returns:
        ``rope_type`` and ``rope_theta``, which are always present, ``partial_rotary_factor`` (1 by default), and what
        the type needs. Types that extend a trained length have it as ``original_max_position_embeddings``, and
        ``factor`` if it follows from the two lengths.

    Raises:
        ModelLoadError: Settings are of the wrong kind, or ``rope_type`` is unknown.
    """
    check_rope(hf_config)
    own: Any = hf_config.get("rope_parameters") or {}
    if layer_type is not None:
        if own and not any(isinstance(value, Mapping) for value in own.values()):
            raise ModelLoadError(
                f"config.json: rope_parameters must hold an object for each type of layer, got {dict(own)!r}"
            )
        own = own.get(layer_type) or {}
        if not isinstance(own, Mapping):
            raise ModelLoadError(f"config.json: rope_parameters[{layer_type!r}] must be an object, got {own!r}")
    nested = [key for key, value in own.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelLoadError(
            f"config.json: rope_parameters for each type of layer ({', '.join(nested)}) are not supported for this "
            "architecture; supported: one set for all layers"
        )
    parameters = dict(hf_config.get("rope_scaling") or {}) | dict(own)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelLoadError(
            f"config.json: rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    parameters["rope_type"] = rope_type
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        if parameters.get(key) is None:
            parameters[key] = default if hf_config.get(key) is None else hf_config[key]
        parameters[key] = scaling_number(parameters, key, rope_type)
    if rope_type in _TYPES_WITH_TRAINED_LENGTH:
        longest = hf_config.get("max_position_embeddings")
        key = "original_max_position_embeddings"
        trained = hf_config.get(key) or parameters.get(key) or longest
        parameters[key] = scaling_number({key: trained}, key, rope_type)
        if parameters.get("factor") is None and longest is not None:
            parameters["factor"] = scaling_number(hf_config, "max_position_embeddings", rope_type) / parameters[key]
    return parameters


def _frequencies(
    parameters: Mapping[str, Any], hf_config: Mapping[str, Any], rotary_dim: int, max_model_len: int
) -> tuple[Tensor, float]:
    """Radians per position of each pair, and the factor on rotated vectors."""
    rope_type = parameters["rope_type"]
    theta = float(parameters["rope_theta"])
    if rope_type == "dynamic":
        factor = scaling_number(parameters, "factor", rope_type)
        trained = scaling_number(hf_config, "max_position_embeddings", rope_type)
        if max_model_len > trained and rotary_dim > 2:
            stretch = factor * max_model_len / trained - (factor - 1)
            theta *= stretch ** (rotary_dim / (rotary_dim - 2))
        return _default_inv_freq(theta, rotary_dim), 1.0
    if rope_type == "linear":
        return _default_inv_freq(theta, rotary_dim) / scaling_number(parameters, "factor", rope_type), 1.0
    if rope_type == "llama3":
        return _llama3_inv_freq(parameters, theta, rotary_dim), 1.0
    if rope_type == "yarn":
        return _yarn(parameters, theta, rotary_dim)
    if rope_type == "longrope":
        return _longrope(parameters, theta, rotary_dim, max_model_len)
    return _default_inv_freq(theta, rotary_dim), 1.0


def _rotary_dim(parameters: Mapping[str, Any], head_dim: int, *, partial: bool) -> int:
    factor = float(parameters["partial_rotary_factor"])
    rotary_dim = int(head_dim * factor)
    if rotary_dim != head_dim and not partial:
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {factor} is not supported for this architecture; supported: 1.0"
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {factor} rotates {rotary_dim} of {head_dim} features of a head; "
            f"supported: an even number from 2 to {head_dim}"
        )
    return rotary_dim


def _default_inv_freq(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return 1.0 / (theta**exponents)


def _llama3_inv_freq(parameters: Mapping[str, Any], theta: float, rotary_dim: int) -> Tensor:
    """Divide the frequencies of long wavelengths by ``factor``, keep short ones, and blend between (Llama 3.1)."""
    inv_freq = _default_inv_freq(theta, rotary_dim)
    factor = scaling_number(parameters, "factor", "llama3")
    low_freq_factor, high_freq_factor = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    trained = float(parameters["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / inv_freq
    smooth = (trained / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(parameters: Mapping[str, Any], theta: float, rotary_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate slow dimensions, keep fast ones, and sharpen attention a little."""
    factor = scaling_number(parameters, "factor", "yarn")
    trained_len = float(parameters["original_max_position_embeddings"])
    beta_fast, beta_slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)
    if theta <= 1:
        raise ModelLoadError(f"config.json: rope type 'yarn' needs a rope_theta above 1, got {theta}")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = parameters.get("attention_factor")
    if not attention_factor:
        numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(trained_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    inv_freq = _default_inv_freq(theta, rotary_dim)
    return inv_freq / factor * interpolated + inv_freq * (1 - interpolated), float(attention_factor)


def _longrope(parameters: Mapping[str, Any], theta: float, rotary_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): divide each dimension's frequency by its own factor, which was found by search."""
    factor = scaling_number(parameters, "factor", "longrope")
    trained = float(parameters["original_max_position_embeddings"])
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        attention_factor = float(attention_factor)
    elif factor <= 1 or trained <= 1:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained))
    name = "long_factor" if max_model_len > trained else "short_factor"
    slowdowns: Any = parameters.get(name)
    if not isinstance(slowdowns, list) or len(slowdowns) != rotary_dim // 2:
        raise ModelLoadError(
            f"config.json: rope type 'longrope' needs {rotary_dim // 2} positive numbers in {name!r}, got "
            f"{str(slowdowns)[:80]}"
        )
    per_pair = torch.tensor(slowdowns, dtype=torch.float32, device="cpu")
    return _default_inv_freq(theta, rotary_dim) / per_pair, attention_factor
