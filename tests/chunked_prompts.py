"""An engine that computes prompts in pieces, and a prompt that it does so with: for log-probabilities of prompts."""

from typing import Any

TEXT = "Once upon a time there was a little girl named Lily. One day Tom and Lily saw a big red ball in the park."
IN_PIECES: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 7,
    "num_gpu_blocks_override": 12,
    "block_size": 8,
    "max_model_len": 72,
    "preemption_immunity_steps": 1,
}
"""Seven tokens per step and few blocks: prompts come in pieces, and some are preempted in the middle."""
