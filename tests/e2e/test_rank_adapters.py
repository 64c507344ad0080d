"""Adapters over layers that ranks share: the tokens are those of one process, and all ranks have read the same."""

import dataclasses
import os
from typing import Any

import pytest

from rank_engines import executor_of, prompts, ranks_of, start, tokens
from rustvllm import SamplingParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.distributed.commands import Command
from rustvllm.exceptions import ModelLoadError, RustVLLMError
from rustvllm.lora.request import LoRARequest

pytestmark = pytest.mark.usefixtures("rank_environment")


def make_adapter(folder: Any, seed: int) -> LoRARequest:
    """Make an adapter for the embedded model, with random weights that are large enough to change its output."""
    import warnings

    import peft
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of each other
        model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), n_head=4)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options, fan_in_fan_out=True))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
        adapted.save_pretrained(folder)
    return LoRARequest(folder.name, seed, str(folder))


@pytest.mark.slow
def test_ranks_give_the_tokens_of_one_with_adapters_and_refuse_what_is_none_together(tmp_path: Any) -> None:
    first, second = make_adapter(tmp_path / "first", 1), make_adapter(tmp_path / "second", 2)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["c_attn"]}')
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    found = []
    for size in (1, 2):
        with start(tensor_parallel_size=size, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
            mine = ranks_of(os.getpid()) if size == 2 else []
            requests = [None, first, second, first, None, second]
            outputs = llm.generate(prompts(6), [greedy] * 6, lora_request=requests, use_tqdm=False)
            with pytest.raises(RustVLLMError, match="broken"):
                llm.generate(prompts(1), greedy, lora_request=LoRARequest("broken", 3, str(broken)), use_tqdm=False)
            again = llm.generate(prompts(6), [greedy] * 6, lora_request=requests, use_tqdm=False)
            found += [[list(each.outputs[0].token_ids) for each in some] for some in (outputs, again)]
            if mine:
                assert executor_of(llm).rank_views()[1].collectives > 0
                executor_of(llm)._ranks.order({"adapter": {"number": 9, "name": "x", "path": str(broken)}})
                number = executor_of(llm)._writer.publish(Command.ADD_ADAPTER, [], 10.0)
                executor_of(llm)._writer.wait_done(number, 10.0)
                assert executor_of(llm)._writer.lines()[0]["value"] == 1, "the other rank says that it could not"
                assert mine[0].is_running()
    assert found[0] == found[1] == found[2] == found[3]
    assert len({str(each) for each in found[0]}) == 6
    with start(num_gpu_blocks_override=400) as llm:
        without = tokens(llm, greedy, prompts(6))
    assert [each[0] == other for each, other in zip(without, found[0], strict=True)] == [
        True, False, False, False, True, False
    ], "the adapters change too little to be seen"  # fmt: skip


def test_ranks_that_read_other_adapters_than_rank_0_are_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_adapter(tmp_path / "first", 1), make_adapter(tmp_path / "second", 2)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8}
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with start(**options) as llm:
        ranks = executor_of(llm)._ranks
        order = ranks.order
        with monkeypatch.context() as patch:
            other = {"path": second.lora_path}
            patch.setattr(ranks, "order", lambda what: order({"adapter": what["adapter"] | other}))
            with pytest.raises(
                RustVLLMError, match=r"'first': worker rank 1 has read other numbers than rank 0. .*/first"
            ):
                llm.generate(prompts(1), greedy, lora_request=first, use_tqdm=False)
        assert llm.llm_engine.list_loras() == set()
        [answer] = llm.generate(prompts(1), greedy, lora_request=first, use_tqdm=False)
        assert answer.outputs[0].token_ids

    def unlike(config: Any) -> Any:
        """The adapters of rank 1: the same folders, each under the name of the other."""
        paths = [module.path for module in reversed(config.lora.modules)]
        modules = [
            dataclasses.replace(module, path=path) for module, path in zip(config.lora.modules, paths, strict=True)
        ]
        return dataclasses.replace(config, lora=dataclasses.replace(config.lora, modules=tuple(modules)))

    monkeypatch.setattr("rustvllm.executor.multiproc.follower_config", unlike)
    with pytest.raises(ModelLoadError, match="worker rank 1 has read other adapters than rank 0"):
        start(**options, lora_modules=[f"first={first.lora_path}", f"second={second.lora_path}"])
