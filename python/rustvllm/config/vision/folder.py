"""Reads how a model sees images from its folder.

The files are ``config.json`` and ``preprocessor_config.json``, or the ``processor_config.json`` that newer checkpoints
have instead.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rustvllm.config.architectures import nested_text
from rustvllm.config.vision import (
    BICUBIC,
    DEFAULT_MAX_IMAGES,
    FRAMED,
    GRID,
    HALVES,
    SINGLE,
    TILED,
    VisionConfig,
    most_tokens,
)
from rustvllm.config.vision.flags import read_image_limit, read_pixel_limits
from rustvllm.config.vision.numbers import CheckedNumbers
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MAX_FILE_BYTES: Final = 1 << 20
"""Most bytes of a file that describes how images are processed."""
MAX_SIDE: Final = 4096
"""Most pixels of a side that an image is resized to; transformers has the same limit for Idefics3."""
_PROCESSORS: Final[Mapping[str, str]] = {
    "CLIPImageProcessor": SINGLE,
    "LlavaImageProcessor": SINGLE,
    "SiglipImageProcessor": SINGLE,
    "Idefics3ImageProcessor": TILED,
    "SmolVLMImageProcessor": TILED,
    "Qwen2VLImageProcessor": GRID,
    "Gemma3ImageProcessor": FRAMED,
}
"""transformers' class of an image processor → how it works; names also end in ``Fast`` or ``Pil``."""
_TEXT_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "LlavaForConditionalGeneration": ("llama", "mistral"),
    "Idefics3ForConditionalGeneration": ("llama",),
    "SmolVLMForConditionalGeneration": ("llama",),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
}
"""Architecture → the ``model_type`` that its text model may have."""
VISION_ARCHITECTURES: Final = frozenset(_TEXT_TYPES)
_KINDS: Final[Mapping[str, str]] = {
    "LlavaForConditionalGeneration": SINGLE,
    "Idefics3ForConditionalGeneration": TILED,
    "SmolVLMForConditionalGeneration": TILED,
    "Qwen2VLForConditionalGeneration": GRID,
    "Qwen2_5_VLForConditionalGeneration": GRID,
    "Qwen3VLForConditionalGeneration": GRID,
    "Gemma3ForConditionalGeneration": FRAMED,
}
"""Architecture → how its image processor works."""
_DEFAULT_PROCESSORS: Final[Mapping[str, str]] = {
    SINGLE: "CLIPImageProcessor", TILED: "Idefics3ImageProcessor", GRID: "Qwen2VLImageProcessor",
    FRAMED: "Gemma3ImageProcessor",
}  # fmt: skip
_PROCESSOR_FILES: Final[Mapping[str, str | None]] = {
    "preprocessor_config.json": None,
    "processor_config.json": "image_processor",
}
"""Files that describe an image processor, the first of which counts → the key where it is; None: the whole file."""
_TOWERS: Final = ("clip_vision_model", "siglip_vision_model")
"""The ``model_type`` that LLaVA's vision tower may have."""
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BILINEAR, _LANCZOS, _LAST_FILTER = 2, 1, 5
"""Pillow's numbers of filters, which are those of the files."""
_FILTERS: Final[Mapping[str, int]] = {SINGLE: BICUBIC, TILED: _LANCZOS, GRID: BICUBIC, FRAMED: _BILINEAR}
"""How an image processor works → the filter that it takes if its file names none."""


def read_vision(
    folder: Path,
    config: Mapping[str, Any],
    architecture: str,
    file: Path,
    limits: Mapping[str, Any] | None,
    *,
    max_model_len: int | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> VisionConfig | None:
    """How a model sees images; None if it sees none.

    Args:
        folder: Of the model.
        config: Its ``config.json``, with ``vision_config`` and ``text_config``.
        architecture: The model's class.
        file: What the configuration was read from, for messages.
        limits: ``limit_mm_per_prompt``.
        max_model_len: Most tokens of prompt and output; None: not known.
        sizes: ``mm_processor_kwargs``.

    Raises:
        ModelLoadError: A value is missing, wrong or not supported; names the file.
        ConfigError: ``limits`` or ``sizes`` are wrong, or not for this model.
    """
    most, pixels = read_image_limit(limits), read_pixel_limits(sizes)
    if pixels and _KINDS.get(architecture) != GRID:
        raise ConfigError(
            f"mm_processor_kwargs has {' and '.join(pixels)}, but {architecture} does not see images in their own "
            "shape: leave it out"
        )
    if architecture not in VISION_ARCHITECTURES:
        if most:
            raise ConfigError(
                f"limit_mm_per_prompt allows {most} images, but {architecture} sees none here: leave it out"
            )
        return None
    (of_text, default_kind), of_tower = nested_text(config, architecture), config.get("vision_config")
    if _KINDS[architecture] == FRAMED and (why := _why_text_alone(folder, of_text, of_tower, most)):
        if most:
            raise ConfigError(f"limit_mm_per_prompt allows {most} images, but {architecture} sees none here: {why}")
        logger.info("%s is served for text alone: %s", architecture, why)
        return None
    if not isinstance(of_text, Mapping) or not isinstance(of_tower, Mapping):
        raise ModelLoadError(f"{file}: {architecture} needs the objects text_config and vision_config")
    kinds, kind = _TEXT_TYPES[architecture], of_text.get("model_type", default_kind)
    if kind not in kinds:
        raise ModelLoadError(
            f"{file}: the text model of {architecture} is {kind!r:.80}; rustvllm supports {' and '.join(kinds)}"
        )
    expected = _KINDS[architecture]
    numbers, name = _image_processor(folder, architecture)
    shared = _shared_numbers(numbers, name, expected) | {"max_images": DEFAULT_MAX_IMAGES if most is None else most}
    tower, image_numbers = CheckedNumbers(of_tower, file), CheckedNumbers(config, file)
    if expected == GRID:
        patch = 16 if architecture == "Qwen3VLForConditionalGeneration" else 14
        return _grid(image_numbers, tower, numbers, pixels, shared, patch, max_model_len)
    side = tower.integer("image_size", 336 if expected == SINGLE else 224)
    patch = tower.integer("patch_size", 14 if expected == SINGLE else 32)
    shared["tile_size"] = side
    if side % patch:
        raise ModelLoadError(f"{file}: image_size {side} of vision_config is not a multiple of patch_size {patch}")
    if expected == FRAMED:
        return _framed(image_numbers, numbers, side // patch, shared)
    if expected == TILED:
        return _tiled(image_numbers, numbers, side // patch, shared)
    return _single(config, of_tower, (side // patch) ** 2, numbers, file, shared)


def _image_processor(folder: Path, architecture: str) -> tuple[CheckedNumbers, str]:
    """What the folder says of how images are processed, and the name of the processor.

    Raises:
        ModelLoadError: It is not the model's, or does what is not supported.
    """
    processor, source = _read_processor(folder)
    numbers = CheckedNumbers(processor, source)
    expected = _KINDS[architecture]
    name = _processor_class(processor, expected)
    if _PROCESSORS.get(name) != expected:
        raise ModelLoadError(
            f"{source}: image_processor_type is {name!r:.80}; for {architecture} "
            f"rustvllm supports {', '.join(name for name, kind in _PROCESSORS.items() if kind == expected)}"
        )
    numbers.require("do_resize", "do_rescale", "do_normalize")
    if processor.get("do_pan_and_scan"):
        raise ModelLoadError(
            f"{source}: do_pan_and_scan is not supported yet: set it to false, so that an image is resized as a whole"
        )
    return numbers, name


def _shared_numbers(numbers: CheckedNumbers, processor: str, kind: str) -> dict[str, Any]:
    """What the processors of all kinds have: how values are scaled, and the filter."""
    has_clips_colours = kind == GRID or (kind == SINGLE and processor != "SiglipImageProcessor")
    return {
        "kind": kind,
        "rescale_factor": numbers.number("rescale_factor", 1 / 255),
        "image_mean": numbers.channels("image_mean", _CLIP_MEAN if has_clips_colours else HALVES),
        "image_std": numbers.channels("image_std", _CLIP_STD if has_clips_colours else HALVES),
        "resample": numbers.integer("resample", _FILTERS[kind], least=0, most=_LAST_FILTER),
    }


def _tiled(
    image_numbers: CheckedNumbers, numbers: CheckedNumbers, patches_per_side: int, shared: dict[str, Any]
) -> VisionConfig:
    """Idefics 3: tiles, whose patches are joined in squares, and perhaps the image as a whole behind them."""
    scale, side = image_numbers.integer("scale_factor", 2), shared["tile_size"]
    if patches_per_side % scale:
        raise ModelLoadError(
            f"{image_numbers.file}: {patches_per_side} patches per side are not a multiple of scale_factor {scale}"
        )
    _check_tile(numbers.side("max_image_size", "longest_edge", side), side, numbers.file)
    longest = numbers.side("size", "longest_edge", 4 * side)
    return VisionConfig(
        image_token_id=image_numbers.integer("image_token_id", 128_257, least=0),
        tokens_per_tile=patches_per_side**2 // scale**2,
        longest_edge=min(longest, MAX_SIDE),
        splits=numbers.values.get("do_image_splitting", True) is not False,
        **shared,
    )


def _single(
    config: Mapping[str, Any],
    of_tower: Mapping[str, Any],
    num_patches: int,
    numbers: CheckedNumbers,
    file: Path,
    shared: dict[str, Any],
) -> VisionConfig:
    """LLaVA: one tile, whose first feature may be left out."""
    tower, side, source = of_tower.get("model_type", "clip_vision_model"), shared["tile_size"], numbers.file
    if tower not in _TOWERS:
        raise ModelLoadError(
            f"{file}: the vision tower is {tower!r:.80}; for LlavaForConditionalGeneration rustvllm supports "
            f"{' and '.join(_TOWERS)}"
        )
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelLoadError(
            f"{file}: vision_feature_select_strategy must be 'default' or 'full', got {strategy!r:.80}"
        )
    has_class_token = tower == "clip_vision_model"
    size = numbers.values.get("size", {"shortest_edge": side})
    if isinstance(size, int):  # older files
        size = {"shortest_edge": size}
    if numbers.values.get("do_pad"):
        raise ModelLoadError(f"{source}: do_pad is not supported yet: set it to false, so that images are cropped")
    crops = numbers.values.get("do_center_crop", tower == "clip_vision_model") is True
    shortest = None
    if isinstance(size, Mapping) and "shortest_edge" in size:
        shortest = numbers.side("size", "shortest_edge", side)
    else:
        for name in ("height", "width"):
            _check_tile(numbers.side("size", name, side), side, source)
    if crops:
        for name in ("height", "width"):
            _check_tile(numbers.side("crop_size", name, side), side, source)
    elif shortest is not None:
        raise ModelLoadError(f"{source}: size names shortest_edge, so do_center_crop must be true")
    if shortest is not None and not side <= shortest <= MAX_SIDE:
        raise ModelLoadError(f"{source}: shortest_edge must be between {side} and {MAX_SIDE}, got {shortest}")
    return VisionConfig(
        image_token_id=CheckedNumbers(config, file).named(("image_token_index", "image_token_id"), 32_000),
        tokens_per_tile=num_patches + has_class_token - (strategy == "default"),
        shortest_edge=shortest,
        **shared,
    )


def _framed(
    image_numbers: CheckedNumbers, numbers: CheckedNumbers, patches_per_side: int, shared: dict[str, Any]
) -> VisionConfig:
    """Gemma 3: one tile, whose patches are averaged in squares."""
    for name in ("height", "width"):
        _check_tile(numbers.side("size", name, 224), shared["tile_size"], numbers.file)
    count = image_numbers.integer("mm_tokens_per_image", 256)
    if (per_side := math.isqrt(count)) ** 2 != count or patches_per_side % per_side:
        raise ModelLoadError(
            f"{image_numbers.file}: mm_tokens_per_image is {count}, but {patches_per_side} x {patches_per_side} "
            "patches must be averaged in squares, as many on each side"
        )
    if (found := numbers.integer("image_seq_length", count)) != count:
        raise ModelLoadError(
            f"{numbers.file}: image_seq_length is {found}, but mm_tokens_per_image of {image_numbers.file.name} is "
            f"{count}"
        )
    return VisionConfig(
        image_token_id=image_numbers.named(("image_token_index", "image_token_id"), 262_144),
        tokens_per_tile=count,
        around_ids=(
            image_numbers.named(("boi_token_index", "boi_token_id"), 255_999),
            image_numbers.named(("eoi_token_index", "eoi_token_id"), 256_000),
        ),
        **shared,
    )


def _why_text_alone(folder: Path, of_text: object, of_tower: object, most: int | None) -> str:
    """Why a model that sees images is served without; empty: it is not."""
    if most == 0:
        return "limit_mm_per_prompt allows no image"
    if not isinstance(of_text, Mapping) or not isinstance(of_tower, Mapping):
        return "its config.json has no vision_config"
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return f"{folder} has no preprocessor_config.json, which says how images are processed"
    return ""


def _grid(
    image_numbers: CheckedNumbers,
    tower: CheckedNumbers,
    numbers: CheckedNumbers,
    pixels: Mapping[str, int],
    shared: dict[str, Any],
    patch_size: int,
    max_model_len: int | None,
) -> VisionConfig:
    """Qwen-VL: a grid of tiles, which are squares of patches; ``patch_size`` is that of towers that do not say."""
    sizes = {"patch_size": (14, patch_size), "merge_size": (2, 2), "temporal_patch_size": (2, 2)}
    found = {name: numbers.integer(name, default) for name, (default, _) in sizes.items()}
    for name, value in found.items():
        of_tower = tower.integer(name if name != "merge_size" else "spatial_merge_size", sizes[name][1])
        if of_tower != value:
            raise ModelLoadError(
                f"{numbers.file}: {name} is {value}, but the vision_config of {tower.file.name} says {of_tower}"
            )
    tile = found["patch_size"] * found["merge_size"]
    size = numbers.values.get("size")
    size = size if isinstance(size, Mapping) else {}
    given = CheckedNumbers({**size, **numbers.values, **pixels}, numbers.file)
    least = given.integer("min_pixels", given.integer("shortest_edge", 56 * 56))
    most = given.integer("max_pixels", given.integer("longest_edge", 28 * 28 * 1280))
    if not tile**2 <= most or least > most:
        wrong = (
            f"min_pixels {least} must be at most max_pixels {most}, which must be at least {tile**2}, a tile of "
            f"{tile} x {tile} pixels"
        )
        if not pixels:
            raise ModelLoadError(f"{numbers.file}: {wrong}")
        [*others] = {"min_pixels", "max_pixels"} - pixels.keys()
        hint = f"; {others[0]} is what {numbers.file} says: set both" if others else ""
        raise ConfigError(f"mm_processor_kwargs: {wrong}{hint}")
    return VisionConfig(
        image_token_id=image_numbers.integer("image_token_id", 151_655, least=0),
        tokens_per_tile=1,
        tile_size=tile,
        min_pixels=least,
        max_pixels=most,
        patch_size=found["patch_size"],
        frames=found["temporal_patch_size"],
        max_tokens=most_tokens(max_model_len),
        around_ids=(
            image_numbers.integer("vision_start_token_id", 151_652, least=0),
            image_numbers.integer("vision_end_token_id", 151_653, least=0),
        ),
        **shared,
    )


def _check_tile(given: int, side: int, source: Path) -> None:
    if given != side:
        raise ModelLoadError(
            f"{source}: images become {given} pixels wide or high, but the vision tower has an image_size of {side}"
        )


def _processor_class(processor: Mapping[str, Any], kind: str) -> str:
    """Transformers' name without what says how it computes."""
    named = processor.get("image_processor_type", processor.get("feature_extractor_type"))
    named = str(named or _DEFAULT_PROCESSORS[kind]).removesuffix("Fast").removesuffix("Pil")
    return named.replace("FeatureExtractor", "ImageProcessor")


def _read_processor(folder: Path) -> tuple[dict[str, Any], Path]:
    """The description of the image processor, and its file."""
    for name, key in _PROCESSOR_FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            with file.open("rb") as opened:
                text = opened.read(MAX_FILE_BYTES + 1)
            value = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
        value = value.get(key) if key is not None and isinstance(value, dict) else value
        if isinstance(value, dict):
            return value, file
        if key is None:
            raise ModelLoadError(f"{file} must be a JSON object of at most {MAX_FILE_BYTES} bytes")
    raise ModelLoadError(f"{folder} has no preprocessor_config.json, which says how images are processed")
