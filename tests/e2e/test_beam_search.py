"""Beam search against transformers' ``generate(num_beams=…)``, and against a plain one over the same model's logits.

Where two candidates are closer than 1e-4 at a place that matters, either may be right: the plain search says where.
"""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import torch
from tests.models.checkpoints import make, prompts

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, SamplingParams
from rustvllm.exceptions import InvalidRequestError

MARGIN = 1e-4
FAMILIES = ("llama", "gpt2", "opt", "gpt-neox")
WIDTHS, PENALTIES = (2, 4, 8), (-1.0, 0.0, 1.0, 2.0)
MAX_TOKENS = 14
PROMPTS = prompts(97, [9, 1, 16])
OPTIONS = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 32,
    "max_num_batched_tokens": 256, "num_gpu_blocks_override": 400, "block_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module", params=[FAMILIES[0], *(pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES[1:])])
def family(request, tmp_path_factory):
    """Transformers' model, the folder of its checkpoint, and a token that ends outputs and is found by searches."""
    reference = make(request.param, {})
    found = [
        {token for beam in generate(reference, PROMPTS[0], width, 1.0, None) for token in beam[2:]} for width in WIDTHS
    ]
    eos = min(set.intersection(*found))
    reference.config.eos_token_id = reference.generation_config.eos_token_id = eos
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    reference.config.eos_token_id = reference.generation_config.eos_token_id = None
    return SimpleNamespace(model=reference, folder=str(folder), eos=eos)


def generate(model, prompt, width, penalty, eos, max_tokens=MAX_TOKENS):
    """Outputs of transformers' search, best first, each with the token that ended it."""
    from transformers import GenerationConfig

    options = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        early_stopping=False,
        length_penalty=penalty,
        eos_token_id=eos,
        pad_token_id=0,
    )
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=options
        )
    outputs = [row[len(prompt) :] for row in ids.tolist()]
    return [output[: output.index(eos) + 1] if eos in output else output for output in outputs]


@torch.no_grad()
def plain_search(model, prompt, width, penalty, ends, max_tokens=MAX_TOKENS):
    """Every continuation of every beam, sorted: the outputs, their scores, and how close the closest decision was."""
    running, ended, margin = [(0.0, [])], [], float("inf")
    num_kept = width * max(2, 1 + len(ends))

    def note(scores):
        nonlocal margin
        margin = min([margin, *(one - other for one, other in itertools.pairwise(scores))])

    for length in range(1, max_tokens + 1):
        logits = model(torch.tensor([[*prompt, *ids] for _, ids in running])).logits[:, -1].double().log_softmax(-1)
        candidates = sorted(
            ((score + row[token], [*ids, token]) for (score, ids), row in zip(running, logits.tolist(), strict=True)
             for token in range(len(row))),
            key=lambda candidate: -candidate[0],
        )  # fmt: skip
        note([score for score, _ in candidates[: num_kept + 1]])
        candidates = candidates[:num_kept]
        for score, ids in candidates[:width]:
            if ids[-1] in ends or length == max_tokens:
                ended.append((score / length**penalty, ids))
        ended.sort(key=lambda candidate: -candidate[0])
        note([score for score, _ in ended[: width + 1]])
        del ended[width:]
        running = [candidate for candidate in candidates if candidate[1][-1] not in ends][:width]
        if len(ended) == width:
            best = running[0][0] / length**penalty
            margin = min(margin, abs(best - ended[-1][0]))
            if best <= ended[-1][0]:
                break
    return ended, margin


def outputs_of(found, prompt):
    return [sequence.tokens[len(prompt) :] for sequence in found.sequences]


def assert_equals_transformers(family, prompt, found, width, penalty, *, eos, max_tokens=MAX_TOKENS):
    """Whether the decisions were clear enough to say anything; then every output is transformers'."""
    mine = outputs_of(found, prompt)
    expected = generate(family.model, prompt, width, penalty, eos, max_tokens)
    if mine == expected:
        return True
    plain, margin = plain_search(family.model, prompt, width, penalty, [] if eos is None else [eos], max_tokens)
    assert margin <= MARGIN, f"{mine} are not {expected} (plain: {plain}), though no decision was closer than {margin}"
    return False


def params(width, penalty, **changes):
    options = {"max_tokens": MAX_TOKENS, "length_penalty": penalty, "include_stop_str_in_output": True, **changes}
    return BeamSearchParams(beam_width=width, **options)


@pytest.fixture(scope="module")
def llm(family):
    with LLM(family.folder, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("width", WIDTHS)
def test_ids_equal_transformers(family, llm, width):
    num_clear = num_stopped = num = 0
    for penalty in PENALTIES:
        for ignore_eos in (False, True):
            found = llm.beam_search(PROMPTS, params(width, penalty, ignore_eos=ignore_eos))
            for prompt, one in zip(PROMPTS, found, strict=True):
                assert len(one.sequences) == width
                eos = None if ignore_eos else family.eos
                num += 1
                num_clear += assert_equals_transformers(family, prompt, one, width, penalty, eos=eos)
                num_stopped += sum(sequence.finish_reason == "stop" for sequence in one.sequences)
    assert num_clear >= 0.9 * num
    assert num_stopped > 0, "no output ended with the token that ends outputs"


def test_scores_are_those_of_a_plain_search(family, llm):
    num_clear = 0
    for width, penalty in ((2, 0.5), (3, 1.0), (5, 0.5), (5, 1.5)):
        for prompt in PROMPTS:
            [found] = llm.beam_search([prompt], params(width, penalty))
            plain, margin = plain_search(family.model, prompt, width, penalty, [family.eos])
            if margin <= MARGIN:
                continue
            num_clear += 1
            assert outputs_of(found, prompt) == [ids for _, ids in plain]
            for sequence, (score, ids) in zip(found.sequences, plain, strict=True):
                assert sequence.cum_logprob / len(ids) ** penalty == pytest.approx(score, abs=1e-4)
                assert [next(iter(place)) for place in sequence.logprobs] == ids
                own = [place[token].logprob for place, token in zip(sequence.logprobs, ids, strict=True)]
                assert sum(own) == pytest.approx(sequence.cum_logprob)
    assert num_clear >= 6, "margins too small to say anything"


def stats_of(llm):
    return llm.llm_engine.engine_core.scheduler.stats()


@pytest.mark.parametrize("caching", [True, False])
def test_neither_memory_nor_chunks_nor_the_prefix_cache_changes_an_output(family, llm, caching):
    """A pool that holds one search and a half, pieces of prompts, one after the other of the same prompts."""
    long = [[*prompt, *PROMPTS[2], *PROMPTS[2]] for prompt in PROMPTS]
    expected = [
        outputs_of(one, prompt) for one, prompt in zip(llm.beam_search(long, params(4, 1.0)), long, strict=True)
    ]
    small = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "enable_prefix_caching": caching,
        "block_size": 4,
    }
    with LLM(family.folder, **(OPTIONS | small | {"num_gpu_blocks_override": 33})) as cramped:
        for _ in range(2):
            found = cramped.beam_search(long, params(4, 1.0))
            assert [outputs_of(one, prompt) for one, prompt in zip(found, long, strict=True)] == expected
        stats = stats_of(cramped)
        assert stats["num_preemptions"] > 0, "they fit together"
        assert stats["num_beam_copies"] > 0
        assert (stats["prefix_cache_hits"] + stats["preempted_cache_hits"] > 0) is caching
        assert stats["num_free_blocks"] == stats["num_usable_blocks"]


def test_with_16_streams_whose_text_is_what_it_is_alone(family, llm):
    streams = prompts(97, range(3, 19), seed=5)
    alone = llm.generate(streams, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    [expected] = llm.beam_search([PROMPTS[0]], params(8, 1.0))
    search = params(8, 1.0).sampling_params()
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    *streamed, found = llm.generate([*streams, PROMPTS[0]], [*[plain] * 16, search], use_tqdm=False)
    assert [one.outputs[0].token_ids for one in streamed] == [one.outputs[0].token_ids for one in alone]
    assert [beam.token_ids for beam in found.outputs] == outputs_of(expected, PROMPTS[0])


def test_an_engine_in_another_process_and_overlapping_steps(family, llm):
    [expected] = llm.beam_search([PROMPTS[0]], params(4, 1.0))
    with LLM(family.folder, **OPTIONS, async_scheduling=True) as overlapping:
        assert overlapping.beam_search([PROMPTS[0]], params(4, 1.0)) == [expected]

    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=family.folder, **OPTIONS))
        try:
            last = None
            async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, params(4, 1.0), "search"):
                last = output
        finally:
            engine.shutdown()
        return last

    last = asyncio.run(run())
    assert last.finished
    assert [beam.token_ids for beam in last.outputs] == outputs_of(expected, PROMPTS[0])
    assert [beam.index for beam in last.outputs] == [0, 1, 2, 3]


def test_an_abort_in_mid_search_frees_everything(family, llm):
    engine = llm.llm_engine
    engine.add_request("search", {"prompt_token_ids": PROMPTS[0]}, params(4, 1.0, ignore_eos=True))
    for _ in range(4):
        assert engine.step() == []
    assert stats_of(llm)["num_running"] == 4
    engine.abort_request("search")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [beam.finish_reason for beam in outputs[-1].outputs] == ["abort"] * 4
    stats = stats_of(llm)
    assert stats["num_free_blocks"] == stats["num_usable_blocks"]
    assert llm.beam_search([PROMPTS[0]], params(4, 1.0)) == llm.beam_search([PROMPTS[0]], params(4, 1.0))


def test_the_token_that_ends_an_output_is_shown_on_request(family, llm):
    [shown] = llm.beam_search([PROMPTS[0]], params(4, 1.0))
    [hidden] = llm.beam_search([PROMPTS[0]], params(4, 1.0, include_stop_str_in_output=False))
    num_stopped = 0
    for one, other in zip(shown.sequences, hidden.sequences, strict=True):
        stopped = one.finish_reason == "stop"
        num_stopped += stopped
        assert other.tokens == (one.tokens[:-1] if stopped else one.tokens)
        assert not stopped or one.tokens[-1] == family.eos
    assert num_stopped > 0


def test_stop_token_ids_end_beams_as_eos_does(family, llm):
    num_clear = 0
    for prompt in PROMPTS:
        [plain] = llm.beam_search([prompt], params(4, 1.0, ignore_eos=True))
        stop = outputs_of(plain, prompt)[0][3]
        search = params(4, 1.0, ignore_eos=True).sampling_params().clone(stop_token_ids=[stop])
        [found] = llm.generate({"prompt_token_ids": prompt}, search, use_tqdm=False)
        expected, margin = plain_search(family.model, prompt, 4, 1.0, [stop])
        if margin <= MARGIN:
            continue
        num_clear += 1
        assert [beam.token_ids for beam in found.outputs] == [ids for _, ids in expected]
        assert stop in [beam.stop_reason for beam in found.outputs]
    assert num_clear >= 1, "margins too small to say anything"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"beam_width": 65}, "beam_width must be at most 64"),
        ({"beam_width": 33}, "max_num_seqs = 32 beams, got 33"),
        ({"beam_width": True}, "beam_width must be an integer"),
        ({"beam_width": "4"}, "beam_width must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": 0.7}, "temperature must be 0 or 1 with use_beam_search"),
        ({"length_penalty": float("nan")}, "length_penalty must be finite"),
        ({"length_penalty": 1e300}, "length_penalty must be from -100 to 100"),
        ({"ignore_eos": None}, "ignore_eos must be true or false"),
    ],
)
def test_wrong_parameters_are_named(llm, changes, message):
    options = {"beam_width": 2, "max_tokens": 4} | changes
    with pytest.raises(InvalidRequestError, match=message):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(**options))
    assert len(llm.beam_search([PROMPTS[0]], params(2, 1.0))) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 0.5), ("repetition_penalty", 1.2),
        ("min_tokens", 2), ("logprobs", 3), ("prompt_logprobs", 0), ("logit_bias", {3: 1.0}),
        ("allowed_token_ids", [1, 2]), ("logits_processors", [lambda ids, row: row]), ("best_of", 4), ("stop", ["x"]),
        ("stop_token_ids", list(range(9))),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(n=2, use_beam_search=True, temperature=0.0, **{name: value})


def test_generate_takes_the_parameters_of_a_search_alone_or_in_a_list(llm):
    wanted = params(2, 1.0)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[:2]]
    alone, listed = (llm.generate(prompts, given, use_tqdm=False) for given in (wanted, [wanted, wanted]))
    for one, other in zip(alone, listed, strict=True):
        assert [beam.token_ids for beam in one.outputs] == [beam.token_ids for beam in other.outputs]
        assert len(one.outputs) == 2


def test_a_vocabulary_too_small_for_the_beams_is_said(llm):
    wide = SamplingParams(n=25, use_beam_search=True, stop_token_ids=[1, 2, 3], max_tokens=2)
    with pytest.raises(InvalidRequestError, match="needs 125 candidates, but the vocabulary has 97"):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, wide, use_tqdm=False)
