"""When the request that is being served came in: known at the front door, wanted where its latency is counted."""

from contextvars import ContextVar

REQUEST_ARRIVAL: ContextVar[int] = ContextVar("rustvllm_request_arrival")
"""Nanoseconds of CLOCK_MONOTONIC, set in the task that serves an HTTP request. Unset: a request arrives when it is
handed to the engine."""
