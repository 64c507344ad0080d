"""What flags say of the images of prompts: ``limit_mm_per_prompt`` and ``mm_processor_kwargs``."""

from collections.abc import Mapping

from rustvllm.config.ranges import require_int
from rustvllm.exceptions import ConfigError


def read_pixel_limits(sizes: object) -> dict[str, int]:
    """The limits of pixels in ``mm_processor_kwargs``.

    Raises:
        ConfigError: It is not a mapping, or holds something else.
    """
    if sizes is None:
        return {}
    if not isinstance(sizes, Mapping):
        raise ConfigError(f'mm_processor_kwargs must be an object such as {{"max_pixels": 1003520}}, got {sizes!r:.80}')
    for name, value in sizes.items():
        if name not in ("min_pixels", "max_pixels"):
            raise ConfigError(f"mm_processor_kwargs may have min_pixels and max_pixels, got {name!r:.40}")
        require_int(f"{name} of mm_processor_kwargs", value, 1, 2**31 - 1)
    return dict(sizes)


def read_image_limit(limits: object) -> int | None:
    """Most images of a prompt; None if nothing says.

    Raises:
        ConfigError: It is not a mapping of numbers, or allows audio or video.
    """
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise ConfigError(f'limit_mm_per_prompt must be an object such as {{"image": 4}}, got {limits!r:.80}')
    for name, value in limits.items():
        count = value.get("count") if isinstance(value, Mapping) else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"limit_mm_per_prompt of {name!r:.40} must be 0 or a positive integer, got {value!r:.80}")
        if name != "image" and count:
            raise ConfigError(f"limit_mm_per_prompt allows {name!r:.40}, but prompts can hold images only: set it to 0")
        if isinstance(value, Mapping) and set(value) != {"count"}:
            raise ConfigError("limit_mm_per_prompt takes numbers of images and no sizes")
    if "image" not in limits:
        return None
    of_images = limits["image"]
    return int(of_images["count"] if isinstance(of_images, Mapping) else of_images)
