"""The memory of a worker: what the KV cache gets, what a step needs at most, and how freed memory is kept."""
