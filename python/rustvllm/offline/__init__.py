"""The parts of :class:`~rustvllm.llm.LLM`: what it takes, and the queue that it runs."""
