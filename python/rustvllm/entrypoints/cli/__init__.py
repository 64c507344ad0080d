"""The command ``rustvllm``."""
