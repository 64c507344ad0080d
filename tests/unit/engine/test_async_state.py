"""What an ``AsyncLLM`` and an ``LLMEngine`` say of themselves, under vLLM's names, and arguments that vLLM has."""

import asyncio
import time

import pytest

from async_streams import GREEDY, LONG, collect
from rustvllm import AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine
from rustvllm.engine.unbuilt import ARGUMENTS, METHODS
from rustvllm.exceptions import ConfigError, EngineDeadError, InvalidRequestError

OF_ASYNC_LLM = """
    abort add_lora add_request check_admission check_health checkpoint_prepare checkpoint_restore collective_rpc
    compute_weight_checksums dead_error do_log_stats encode errored finish_weight_update from_engine_args
    from_vllm_config generate get_kv_event_sources get_num_queued_tokens get_num_unfinished_requests get_status
    get_supported_tasks get_tokenizer get_weight_version handle_fault init_weight_transfer_engine input_processor
    is_paused is_running is_sleeping is_stopped is_tracing_enabled list_loras model_config
    notify_kv_transfer_request_rejected pause_generation pin_lora release_kv_cache_memory remove_lora renderer
    reset_encoder_cache reset_mm_cache reset_prefix_cache resume_generation scale_elastic_ep shutdown
    shutdown_weight_transfer_engine sleep start_draft_weight_update start_profile start_weight_update stop_profile
    tokenizer update_weight_version update_weights vllm_config wait_for_requests_to_drain wake_up
"""
OF_LLM_ENGINE = """
    abort_request add_lora add_request apply_model collective_rpc do_log_stats do_log_stats_with_interval
    from_engine_args from_vllm_config get_metrics get_num_unfinished_requests get_supported_tasks get_tokenizer
    get_weight_version has_unfinished_requests has_unfinished_requests_dp is_sleeping list_loras model_config pin_lora
    release_kv_cache_memory remove_lora renderer reset_encoder_cache reset_mm_cache reset_prefix_cache
    set_weight_version sleep start_profile step stop_profile tokenizer vllm_config wake_up
"""


@pytest.fixture
def make(make_async):
    return make_async


@pytest.fixture
def engine(toy_config, toy_executors):
    made = LLMEngine.from_vllm_config(toy_config("llm_class"))
    yield made
    made.shutdown()


def refused(engine, names):
    """Those that are not there; each says why."""
    found = {name for name in names.split() if not hasattr(engine, name)}
    for name in found:
        with pytest.raises(AttributeError) as refusal:
            getattr(engine, name)
        assert str(refusal.value) == f"{type(engine).__name__}.{name} is not supported yet: {METHODS[name]}"
    return found


async def test_every_name_is_there_or_says_why_not(make, engine):
    assert "sleep" in refused(make(), OF_ASYNC_LLM)
    assert "sleep" in refused(engine, OF_LLM_ENGINE)
    with pytest.raises(AttributeError, match="'AsyncLLM' object has no attribute 'nothing'"):
        make().nothing  # noqa: B018 -- the access is the test


async def test_state_from_the_start_to_the_end(make):
    engine = make()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)
    assert await engine.check_health() is None
    assert (await engine.is_sleeping(), await engine.is_paused(), await engine.is_tracing_enabled()) == (False,) * 3
    assert await engine.get_supported_tasks() == ("generate",)
    assert await engine.reset_mm_cache() is await engine.reset_encoder_cache() is None
    engine.shutdown(timeout=1.0)
    assert (engine.is_running, engine.is_stopped, engine.errored) == (False, True, False)
    with pytest.raises(EngineDeadError, match="was shut down"):
        raise engine.dead_error
    for call in (engine.check_health, engine.reset_prefix_cache, engine.wait_for_requests_to_drain):
        with pytest.raises(EngineDeadError, match="was shut down"):
            await call()


async def test_the_prefix_cache_is_forgotten_between_two_steps(make, toy_executors):
    engine = make(block_size=4)
    prompt = "abcdefghijkl"
    await collect(engine, prompt, GREEDY, "first")
    assert (await collect(engine, prompt, GREEDY, "again"))[-1].num_cached_tokens == 8
    assert await engine.reset_prefix_cache() is True
    assert (await collect(engine, prompt, GREEDY, "anew"))[-1].num_cached_tokens == 0
    stream = await engine.add_request("long", prompt, LONG)
    first = await anext(stream)
    toy_executors[0].gate.clear()
    resets = [asyncio.ensure_future(engine.reset_prefix_cache(preempt)) for preempt in (False, True)]
    await asyncio.sleep(0.05)
    toy_executors[0].gate.set()
    assert await asyncio.gather(*resets) == [False, True]
    rest = [output async for output in stream]
    ids = [token_id for output in (first, *rest) for token_id in output.outputs[0].token_ids]
    assert len(ids) == len(set(ids)) > 40, "a request that was computed again lost or repeated tokens"


async def test_waiting_for_the_last_request(make, toy_executors):
    engine = make()
    await engine.wait_for_requests_to_drain()
    toy_executors[0].gate.clear()
    stream = await engine.add_request("r", "a", GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    with pytest.raises(TimeoutError, match="1 requests were left after"):
        await engine.wait_for_requests_to_drain(0.1)
    with pytest.raises(InvalidRequestError, match="drain_timeout"):
        await engine.wait_for_requests_to_drain(-1)
    waiting = asyncio.ensure_future(engine.wait_for_requests_to_drain(10))
    await asyncio.sleep(0)
    toy_executors[0].gate.set()
    await waiting
    assert engine.get_num_unfinished_requests() == 0
    assert [output async for output in stream][-1].finished


async def test_arguments_of_requests_as_vllm_has_them(make, engine):
    serving = make()
    prompt = serving.input_processor.process("ab", GREEDY)
    outputs = [output async for output in serving.generate(prompt, GREEDY, "ready", session_id=None, kv_hints=None)]
    assert outputs[-1].outputs[0].text == "cdef"
    came = time.time() - 100
    stream = await serving.add_request("old", "ab", GREEDY, came, None, {"add_special_tokens": True}, None, 0)
    last = [output async for output in stream][-1]
    assert 100 <= time.monotonic() - last.metrics.arrival_time < 160
    assert engine.add_request("r", "ab", GREEDY, came, None, None, None, 0) == "r"
    for name, why in ARGUMENTS.items():
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported yet") as refusal:
            engine.add_request("s", "ab", GREEDY, **{name: "x"})
        assert why in str(refusal.value)
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported yet"):
            await serving.add_request("s", "ab", GREEDY, **{name: "x"})
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported yet"):
            await anext(serving.generate("ab", GREEDY, "s", **{name: "x"}))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        await anext(serving.generate("ab", GREEDY, "s", nothing=1))
    for wrong in (float("nan"), float("inf"), -1, "now", True, 10**400):
        with pytest.raises(InvalidRequestError, match="arrival_time"):
            await serving.add_request("s", "ab", GREEDY, wrong)
    with pytest.raises(InvalidRequestError, match="may only have add_special_tokens, got padding"):
        await serving.add_request("s", "ab", GREEDY, tokenization_kwargs={"padding": True})
    await serving.abort("old", internal=True)


async def test_constructors_as_vllm_has_them(toy_config, toy_executors):
    config = toy_config("api_server")
    made = AsyncLLM.from_vllm_config(config, True, "api_server", None, False, False, True)
    assert made.vllm_config.log_stats is False
    made.shutdown()
    for wrong in (
        {"start_engine_loop": False},
        {"enable_log_requests": True},
        {"client_addresses": {"input_address": "x"}},
        {"client_count": 2},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.* (must be True|not supported yet)"):
            AsyncLLM.from_vllm_config(config, **wrong)
    with pytest.raises(ConfigError, match="start_engine_loop must be True, got False"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(executor="sim"), False)
    with pytest.raises(ConfigError, match="multiprocess=True"):
        LLMEngine.from_engine_args(EngineArgs(executor="sim"), enable_multiprocessing=True)
