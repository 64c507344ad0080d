"""``rustvllm bench``: what things cost."""
