"""One device's share of the engine: its memory, its model and the batch that persists between steps."""
