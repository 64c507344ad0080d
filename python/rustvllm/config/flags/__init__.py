"""The flags of an engine.

``engine``: which there are, with their types, defaults and help. ``refused``: vLLM's that are not built here, each with
the reason. ``fields``: what makes flags of a dataclass's fields, and what reads numbers and JSON from a command line.
"""
