"""The runner driven by the naive scheduler: the two calls, sampling through rows, failures, and one row's poison."""

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, load, make, prompts
from naive_schedule import NaiveEngine, Request

from rustvllm.exceptions import SchedulerStateError
from rustvllm.sample.grammar_output import GrammarOutput
from rustvllm.worker.memory.profile_run import profile_run
from rustvllm.worker.model_runner import STATE_ERROR
from rustvllm.worker.step_output import ModelRunnerOutput


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make(*VARIANTS[request.param]).save_pretrained(folder)
    return load(folder)


def outputs(model, requests, **options):
    NaiveEngine(model, **options).run(requests)
    return [r.output for r in requests]


def test_sampling_needs_an_executed_step(model):
    engine = NaiveEngine(model)
    with pytest.raises(SchedulerStateError) as caught:
        engine.runner.sample_tokens()
    assert (
        str(caught.value)
        == STATE_ERROR
        == "State error: sample_tokens() must be called after execute_model() returns None."
    )


def test_an_executed_step_must_be_sampled_before_the_next(model, monkeypatch):
    engine = NaiveEngine(model)
    engine.running = []
    requests = [Request([1, 2, 3], 4)]
    engine.run(requests)
    sample = engine.runner.sample_tokens
    monkeypatch.setattr(
        engine.runner,
        "sample_tokens",
        lambda: ModelRunnerOutput(np.zeros((1, 1), np.int32)),
    )
    engine.admit(again := [Request([1, 2, 3], 4)])
    engine.step()
    with pytest.raises(SchedulerStateError, match="State error"):
        engine.step()
    assert sample().sampled_token_ids[0, 0] == requests[0].output[0], "the refused call did not disturb the step before"
    with pytest.raises(SchedulerStateError):
        sample()
    assert again[0].output == [0]


def test_a_discarded_step_makes_room_for_the_next(model):
    engine = NaiveEngine(model)
    original = engine.runner.sample_tokens
    engine.runner.sample_tokens = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    engine.admit([Request([1, 2], 2)])
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.discard_step()
    engine.runner.sample_tokens = original
    engine.leave(engine.running[0], "finished_rows")
    expected = outputs(model, [Request([5, 6, 7], 6)])
    assert [r.output for r in engine.run([Request([5, 6, 7], 6)])] == expected


def test_a_step_without_samples_gives_none(model):
    requests = [Request(prompts(97, [40])[0], 3)]
    engine = NaiveEngine(model, chunk=10)
    engine.run(requests)
    assert [s.num_sampled for s in engine.steps] == [0, 0, 0, 1, 1, 1]


def test_a_failed_step_leaves_the_runner_usable(model):
    expected = outputs(model, [Request(p, 10) for p in prompts(97, [5, 9])])
    engine = NaiveEngine(model)
    victim = Request(
        prompts(97, [12], seed=3)[0], 10, {"temperature": 1.0, "repetition_penalty": 2.0}, stop_token_ids=(1,)
    )
    forward, calls = model.forward, []

    def broken(*args):
        calls.append(args)
        forward(*args)  # the cache is already written when it fails
        raise RuntimeError("no")

    model.forward = broken
    try:
        engine.admit([victim])
        with pytest.raises(RuntimeError, match="no"):
            engine.step()
    finally:
        del model.forward
    assert calls
    # The failed request ends without this runner hearing of it; its row and blocks go to others.
    row = victim.row
    engine.leave(victim, "finished_rows")
    engine.left["finished_rows"].clear()
    requests = [Request(p, 10) for p in prompts(97, [5, 9])]
    engine.run(requests)
    assert [r.output for r in requests] == expected
    assert row in engine.free_rows


def test_a_seeded_request_draws_the_same_alone_in_company_and_after_preemption(model):
    params = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1234}
    prompt = prompts(97, [13])[0]
    (alone,) = outputs(model, [Request(prompt, 20, params)])
    others = [Request(p, 30, {"temperature": 1.5, "seed": i}) for i, p in enumerate(prompts(97, range(1, 64), seed=9))]
    for i, r in enumerate(others):
        r.arrives = i % 5
    mine = Request(prompt, 20, params, arrives=3, preempt_at=(4, 11))
    outputs(model, [*others, mine], budget=64, chunk=10, num_blocks=2000)
    assert mine.num_preemptions == 2
    assert mine.output == alone
    (again,) = outputs(model, [Request(prompt, 20, params | {"seed": 1235})])
    assert again != alone


def test_greedy_and_random_rows_mix(model):
    greedy = Request(prompts(97, [7])[0], 15)
    random = Request(prompts(97, [7])[0], 15, {"temperature": 2.0, "seed": 5})
    expected = outputs(model, [Request(greedy.prompt, 15)])[0]
    outputs(model, [random, greedy])
    assert greedy.output == expected
    assert random.output != expected


def test_min_tokens_masks_stop_ids_until_there_are_enough(model):
    prompt = prompts(97, [6])[0]
    (free,) = outputs(model, [Request(prompt, 12)])
    banned = tuple(set(free[:5]))
    masked = Request(prompt, 12, {"min_tokens": 5}, stop_token_ids=banned)
    other = Request(prompt, 12)
    engine = NaiveEngine(model)
    engine.run([masked, other])
    assert other.output == free, "a neighbour without min_tokens is not masked"
    assert not set(masked.output[:5]) & set(banned)
    for i, (token, logits) in enumerate(zip(masked.output, masked.logits, strict=True)):
        allowed = logits.clone()
        if i < 5:
            allowed[list(banned)] = -torch.inf
        assert token == int(allowed.argmax()), "and from then on nothing is masked"
    # The row's ids are replaced with its request.
    again = Request(prompt, 12, {"min_tokens": 5}, stop_token_ids=())
    engine.run([again])
    assert again.output == free


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.9}])
def test_penalties_follow_the_request_through_chunks_prefix_hits_and_preemption(model, params):
    common = prompts(97, [20], seed=2)[0]
    requests = [Request(common + tail, 20, dict(params), preempt_at=(6,)) for tail in prompts(97, [2, 3, 9])]
    plain = Request(common, 20)
    engine = NaiveEngine(model, chunk=8, share_prefixes=True)
    engine.run([*requests, plain])
    assert sum(r.num_shared_tokens for r in requests) > 0
    full = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0} | params
    changed = 0
    for r in requests:
        for i, (token, logits) in enumerate(zip(r.output, r.logits, strict=True)):
            expected = torch.tensor(_penalised(logits.tolist(), r.prompt, r.output[:i], **full))
            top = expected.topk(2)
            if top.values[0] - top.values[1] > 1e-4:
                assert token == int(top.indices[0])
            changed += token != int(logits.argmax())
    assert changed > 5
    assert plain.output == outputs(model, [Request(common, 20)])[0]


def _penalised(logits, prompt, output, presence_penalty, frequency_penalty, repetition_penalty):
    for token in set(prompt) | set(output):
        logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
    for token in set(output):
        logits[token] -= frequency_penalty * output.count(token) + presence_penalty
    return logits


def test_penalties_without_a_source_of_tokens_are_an_error(model):
    engine = NaiveEngine(model)
    engine.runner.input_batch.token_ids = None
    engine.admit([Request([1, 2, 3], 2, {"presence_penalty": 1.0})])
    with pytest.raises(RuntimeError, match="bind_token_ids"):
        engine.step()


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_poisoned_request_harms_no_other(model, chunk):
    """One id's embedding is NaN: its request's KV is NaN, in its own blocks and, later, in blocks others get."""
    good = prompts(96, [5, 9, 14])
    expected = outputs(model, [Request(p, 12) for p in good])
    weight = model.embed_tokens.weight
    before = weight[96].clone()
    tied = model.lm_head is None
    try:
        weight[96] = torch.nan
        if tied:  # the head would give every row a NaN logit
            model.lm_head = torch.nn.Linear(1, 1)
            model.lm_head.weight = torch.nn.Parameter(torch.cat((weight[:96], before[None])), requires_grad=False)
        bad = [Request([1, 96, 3, 4, 5, 6, 7], 6, params) for params in ({}, {"temperature": 1.0, "top_p": 0.5})]
        requests = [Request(p, 12, arrives=i) for i, p in enumerate(good)]
        # So few blocks and rows that those of the bad requests are used again.
        engine = NaiveEngine(model, num_blocks=24, max_num_seqs=5, chunk=chunk)
        engine.run([*bad, *requests])
        late = [Request(p, 12) for p in good]
        engine.run(late)
    finally:
        weight[96] = before
        if tied:
            model.lm_head = None
    assert all(torch.stack(r.logits).isnan().all() for r in bad), "the poison worked"
    assert [r.output for r in bad] == [[-1], [-1]]
    assert [r.output for r in requests] == expected
    assert [r.output for r in late] == expected


def test_profile_run_leaves_no_trace(model):
    engine = NaiveEngine(model)
    profile_run(engine.runner, [7, 7, 1, 128], torch.float32)
    assert all(not cache.any() for cache in engine.runner.kv_caches)
    assert outputs(model, [Request([1, 2, 3], 5)]) == [engine.run([Request([1, 2, 3], 5)])[0].output]


def test_a_bitmask_decides_what_its_row_may_take(model):
    engine = NaiveEngine(model)
    engine.admit([Request([1, 2, 3], 1), Request([4, 5], 1, {"num_logprobs": 2}), Request([6], 1, {"num_logprobs": 1})])
    sample = engine.runner.sample_tokens
    bitmask = np.zeros((2, 4), np.int32)
    bitmask[1, 2] = 1 << 5  # 69 alone
    grammar = GrammarOutput(bitmask, np.array([2, 0], np.int32), np.array([-2, 0], np.int32), np.zeros(2, np.int32))
    outputs = []

    def sample_with_grammar():
        with pytest.raises(SchedulerStateError):
            engine.runner.execute_model(engine.steps[-1])
        outputs.append(sample(grammar))
        return outputs[-1]

    engine.runner.sample_tokens = sample_with_grammar
    engine.step()
    (output,) = outputs
    ids = output.sampled_token_ids[:, 0].tolist()
    assert ids[0] == 69
    assert 0 <= ids[1] < 97
    assert ids[2] == -2, "what stands for no token there"
    places, token_ids, _, _ = output.logprobs
    assert places.tolist() == [1], "and nothing is said of it"
    assert token_ids[0, 0] == ids[1]


def test_a_bitmask_of_another_shape_is_refused_and_the_step_is_gone(model):
    engine = NaiveEngine(model)
    sample = engine.runner.sample_tokens
    wrong = GrammarOutput(np.zeros((1, 1), np.int32), *np.zeros((3, 1), np.int32))
    engine.runner.sample_tokens = lambda: sample(wrong)
    engine.admit([Request([1, 2, 3], 1)])
    with pytest.raises(ValueError, match=r"must be int32 of shape \(1, 4\), got int32 of shape \(1, 1\)"):
        engine.step()
    with pytest.raises(SchedulerStateError):
        sample()
