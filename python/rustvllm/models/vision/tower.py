"""The part of a model that sees: transformers' vision tower and projector, which turn pixels into embeddings.

The text model is rustvllm's own, so transformers builds its model around a text model without layers, which is then
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from rustvllm.config.vision import GRID, TILED, VisionConfig
from rustvllm.exceptions import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEXT_PARTS: Final = ("language_model", "text_model")
_KEPT: Final = (
    "vision_config", "text_config", "projector_hidden_act", "vision_feature_layer", "scale_factor",
    "vision_feature_select_strategy", "multimodal_projector_bias", "image_token_index", "image_token_id",
    "mm_tokens_per_image",
)  # fmt: skip
"""What transformers needs of a configuration to build the parts that see."""
_NO_TEXT: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 0,
    "vocab_size": 8,
    "intermediate_size": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "layer_types": None,  # there would be one for each layer
}
"""What makes transformers' text model small; its width is what the projector needs of it."""


class VisionTower(nn.Module):
    """Turns tiles of images into embeddings of tokens.

    Args:
        hf_config: The flat configuration of the whole model, with ``text_config`` and ``vision_config``.
        vision: How the model sees images.
        architecture: The model's class.

    Raises:
        ModelLoadError: transformers does not take the configuration.
    """

    def __init__(self, hf_config: Mapping[str, Any], vision: VisionConfig, architecture: str) -> None:
        super().__init__()
        self.vision = vision
        self.parts: Any = _make_parts(hf_config, architecture)
        shape = (vision.image_mean, vision.image_std)
        self._mean, self._std = (torch.tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in shape)

    def forward(self, pixels: Tensor) -> Tensor:
        """The embeddings of an image's tokens.

        Args:
            pixels: uint8 ``[tiles, channels, height, width]``; of a grid, ``[1, channels, height, width]``.

        Returns:
            ``[tiles * tokens_per_tile, hidden_size]``. If the model adds features between its first layers, too, the
            rows are so many times wider; see ``CausalLM.given_rows``.
        """
        values = (pixels.to(torch.float32) * self.vision.rescale_factor - self._mean) / self._std
        values = values.to(self.parts.dtype)
        if self.vision.kind == GRID:
            side = self.vision.patch_size
            grid = torch.tensor([[1, values.shape[2] // side, values.shape[3] // side]])
            found = self.parts.get_image_features(patches_of(values[0], self.vision), grid)
        elif self.vision.kind == TILED:
            everything = torch.ones(1, *pixels.shape[:1], *pixels.shape[2:], dtype=torch.bool)
            # A tile that is 0 throughout would count as padding, so such tiles are nudged.
            values[(values == 0).flatten(1).all(1)] = torch.finfo(values.dtype).tiny
            found = self.parts.get_image_features(values[None], everything)
        else:
            found = self.parts.get_image_features(values)
        rows = torch.cat([*found.pooler_output], dim=0)
        between = getattr(found, "deepstack_features", None) or ()
        return torch.cat([rows, *(torch.cat([*level], dim=0) for level in between)], dim=1)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every parameter, by the name that :func:`tower_name` gives to a checkpoint's tensor."""
        return {tower_name(name): parameter for name, parameter in self.parts.named_parameters()}


def patches_of(image: Tensor, vision: VisionConfig) -> Tensor:
    """The patches of an image, tile by tile: ``[channels, height, width]`` → ``[patches, features of a patch]``."""
    side, per_tile = vision.patch_size, vision.tile_size // vision.patch_size
    channels, height, width = image.shape
    rows, columns = height // vision.tile_size, width // vision.tile_size
    cut = image.view(channels, rows, per_tile, side, columns, per_tile, side).permute(1, 4, 2, 5, 0, 3, 6)
    frames = cut[..., None, :, :].expand(*cut.shape[:5], vision.frames, side, side)
    return frames.reshape(rows * columns * per_tile**2, channels * vision.frames * side**2)


def tower_name(name: str) -> str:
    """The name of a checkpoint's tensor without what differs between releases of transformers."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def _make_parts(hf_config: Mapping[str, Any], architecture: str) -> PreTrainedModel:
    import transformers  # its modelling code takes seconds to import

    model_class: Any = getattr(transformers, architecture)
    flat = {**hf_config, "text_config": {**hf_config["text_config"], **_NO_TEXT}}
    try:
        config = model_class.config_class.from_dict(deepcopy({name: flat[name] for name in _KEPT if name in flat}))
        parts: Any = getattr(transformers, architecture.replace("ForConditionalGeneration", "Model"))(config)
    except Exception as error:  # configuration classes raise their own errors
        message = str(error).strip().splitlines()
        raise ModelLoadError(
            f"transformers' {architecture} rejects this config.json: {message[0] if message else error!r}"
        ) from error
    for name in _TEXT_PARTS:
        if hasattr(parts, name):
            delattr(parts, name)
    loaded: PreTrainedModel = parts.eval().requires_grad_(False)
    return loaded
