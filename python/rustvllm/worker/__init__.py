"""The part of the engine that runs on one device: its memory, its model and the batch that persists between steps."""
