"""From a folder of safetensors to a model on its device."""

from rustvllm.model_loader.loader import load_model

__all__ = ["load_model"]
