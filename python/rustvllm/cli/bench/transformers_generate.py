""":class:`TransformersGenerate`: the model of a configuration as transformers itself runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import transformers

from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.worker.host_resources import num_compute_threads
from rustvllm.worker.worker import resolve_dtype

if TYPE_CHECKING:
    from rustvllm.config import ModelConfig

logger = init_logger(__name__)


class TransformersGenerate:
    """Greedy ``generate`` over batches of prompts of one length.

    Args:
        config: Of the model; its folder is read again.
        device: ``cpu`` or ``cuda``.
        is_dummy: Random weights: only the architecture is the same, and speed depends on nothing else.

    Raises:
        ModelLoadError: transformers cannot load it.
    """

    def __init__(self, config: ModelConfig, device: str, *, is_dummy: bool) -> None:
        self._device = torch.device(device)
        dtype = resolve_dtype(config.dtype, self._device, config.hf_config)
        self._num_threads = num_compute_threads()
        auto = transformers.AutoModelForCausalLM
        try:
            if is_dummy:
                hf_config = transformers.AutoConfig.from_pretrained(config.path, local_files_only=True)  # noqa: TID251 -- torch is here
                model = auto.from_config(hf_config, dtype=dtype)  # type: ignore[no-untyped-call]
            else:
                model = auto.from_pretrained(config.path, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ModelLoadError(f"transformers cannot load {config.path}: {error}") from error
        self._model = model.to(self._device).eval()
        logger.info("transformers %s, attention %s", transformers.__version__, model.config._attn_implementation)  # noqa: SLF001 -- has no other name

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, batch_size: int) -> tuple[float, int]:
        """Draw exactly ``max_tokens`` after each prompt.

        Args:
            prompts: Token ids; all of one length.
            max_tokens: Of each answer.
            batch_size: Prompts at a time.

        Returns:
            Seconds, and how many tokens were drawn.
        """
        # This engine may have settled on another number, for itself.
        num_threads_before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return self._generate(prompts, max_tokens, batch_size)
        finally:
            torch.set_num_threads(num_threads_before)

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, batch_size: int) -> tuple[float, int]:
        num_drawn = 0
        began = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            ids = torch.tensor(prompts[first : first + batch_size], device=self._device)
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
            )
            num_drawn += output.shape[0] * (output.shape[1] - ids.shape[1])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began, num_drawn
