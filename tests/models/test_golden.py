"""The published small checkpoints against the outputs that transformers gave for them (golden.json)."""

import json

import pytest
import torch
from checkpoints import load
from naive_schedule import NaiveEngine, Request


@pytest.fixture(params=["stories260K", "slm4096-gpt2"])
def golden(request, shared_dir):
    folder = shared_dir / "data" / request.param
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    assert len(cases) >= 3
    return folder / "hf", cases


@pytest.mark.parametrize("options", [{}, {"budget": 16, "chunk": 7}, {"block_size": 16, "share_prefixes": True}])
def test_greedy_ids_and_log_probs(golden, options):
    folder, cases = golden
    hf_config = json.loads((folder / "config.json").read_text())
    max_model_len = hf_config.get("max_position_embeddings") or hf_config["n_positions"]
    model = load(folder, max_model_len=max_model_len)
    requests = [Request(case["prompt_ids"], len(case["greedy_ids"])) for case in cases]
    NaiveEngine(model, max_model_len=max_model_len, num_blocks=2000, **options).run(requests)
    for case, request in zip(cases, requests, strict=True):
        assert case["min_top1_top2_margin"] > 5e-4, "the golden ids are only certain with a margin"
        assert request.output == case["greedy_ids"]
        log_probs = torch.stack(request.logits).log_softmax(-1)
        for step, expected in enumerate(case["top5_logprobs_first16"]):
            ids = torch.tensor([token for token, _ in expected])
            values = torch.tensor([value for _, value in expected])
            torch.testing.assert_close(log_probs[step, ids], values, atol=1e-4, rtol=0)
