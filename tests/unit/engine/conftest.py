"""An ``AsyncLLM`` over toy models, for the tests of this folder."""

import gc

import pytest

from rustvllm import AsyncLLM


@pytest.fixture
def make_async(toy_config, toy_executors):
    """Makes engines with the configuration's changes; ends them after the test."""
    engines = []

    def build(**changes):
        engines.append(AsyncLLM.from_engine_config(toy_config("api_server", **changes)))
        return engines[-1]

    yield build
    for executor in toy_executors:
        executor.gate.set()
    for engine in engines:
        engine.shutdown()
    gc.unfreeze()
