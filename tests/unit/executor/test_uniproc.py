"""The executor in front of the real core: the order of its calls, and a whole step by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rustvllm import _core
from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import DeviceMemoryError, SchedulerStateError
from rustvllm.executor.uniproc import UniProcExecutor


@pytest.fixture
def config(tmp_path):
    hf_config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50, "n_positions": 64, "n_embd": 16,
        "n_layer": 2, "n_head": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    args = EngineArgs(
        model=str(tmp_path), load_format="dummy", device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=20,
        max_num_seqs=4, max_num_batched_tokens=32,
    )  # fmt: skip
    return args.create_engine_config("llm_class")


def test_nothing_runs_before_the_model_is_loaded(config):
    executor = UniProcExecutor(config)
    for call in (executor.determine_num_blocks, executor.sample_tokens, executor.discard_step):
        with pytest.raises(RuntimeError, match="load_model must be called first"):
            call()


def test_a_request_by_hand(config):
    executor = UniProcExecutor(config)
    executor.load_model()
    assert (executor.device.type, str(executor.dtype)) == ("cpu", "torch.float32")
    num_blocks = executor.determine_num_blocks()
    assert num_blocks == 20
    core_config = _core.SchedulerConfig(
        num_blocks=num_blocks, max_model_len=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=32
    )
    sets = executor.initialize_kv_cache(num_blocks, _core.step_buffer_spec(core_config), 2)
    scheduler = _core.Scheduler(core_config, sets)
    executor.bind_token_ids(scheduler.token_ids)
    with pytest.raises(SchedulerStateError, match="State error"):
        executor.sample_tokens()

    handle = scheduler.handle
    prompt = list(range(1, 41))  # more than one step's budget
    handle.add_request(handle.new_key(), "a", prompt, max_tokens=5, temperature=1.0, seed=7, frequency_penalty=1.0)
    sampled = []
    while (output := scheduler.schedule()) is not None:
        executor.execute_model(output)
        with pytest.raises(SchedulerStateError, match="State error"):
            executor.execute_model(output)
        ids = executor.sample_tokens(None).sampled_token_ids
        assert ids.shape == (output.num_sampled, 1)
        assert ids.dtype == np.int32
        assert ids.flags.c_contiguous
        sampled.append(ids[:, 0].tolist())
        scheduler.update_from_output(output, ids)
    assert [len(ids) for ids in sampled] == [0, 1, 1, 1, 1, 1]
    assert all(0 <= token < 50 for ids in sampled for token in ids)
    executor.shutdown()
    with pytest.raises(RuntimeError):
        executor.determine_num_blocks()


@pytest.mark.parametrize(
    ("where", "what"), [("execute_model", "a step of 3 tokens of 1 requests"), ("sample_tokens", "sampling")]
)
def test_out_of_memory_fails_a_step_with_what_to_lower(config, monkeypatch, where, what):
    executor = UniProcExecutor(config)
    executor.load_model()
    monkeypatch.setattr(
        executor._runner, where, lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("tried to allocate 2 GiB"))
    )
    step = SimpleNamespace(total_num_scheduled_tokens=3, num_reqs=1)
    with pytest.raises(DeviceMemoryError, match=f"out of memory in {what} .tried to allocate 2 GiB.; lower gpu_memory"):
        getattr(executor, where)(*([step] if where == "execute_model" else []))
