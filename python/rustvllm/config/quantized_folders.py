"""Checkpoints whose weights were quantised by other tools: named, and refused with what would work instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rustvllm.exceptions import ModelLoadError

_NAMES: Final[Mapping[str, str]] = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}


def refuse_quantized(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration with a ``quantization_config``.

    Raises:
        ModelLoadError: Names the method, its bits, and what works.
    """
    how = config.get("quantization_config")
    if not isinstance(how, Mapping) or not isinstance(method := how.get("quant_method"), str):
        return
    what = [_NAMES.get(method, method)[:40]]
    if method == "bitsandbytes":
        what.append(str(how.get("bnb_4bit_quant_type", "nf4")) if how.get("load_in_4bit") else "int8")
    elif isinstance(bits := how.get("bits", how.get("w_bit")), int):
        what.append(f"of {bits} bits")
    raise ModelLoadError(
        f"{path / 'config.json'}: this checkpoint is {' '.join(what)} (quantization_config), which is not served. Use "
        "a GGUF file of this model (--model owner/name:Q8_0), or the model it was made of, on the CPU with "
        "--quantization int8"
    )
