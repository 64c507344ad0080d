"""The same engine without drafts and with, what both must agree on, and the requests that they are asked."""

from dataclasses import dataclass

from rustvllm import LLM, SamplingParams
from rustvllm.sampling_params import StructuredOutputsParams

STORY = "Once upon a time there was a"
"""A prompt whose answer repeats nothing."""
PROMPTS = [
    "Tom had a red ball. Tom had a red ball. Tom had a red",
    "One day, a girl named Lily went to the park. One day, a girl named Lily",
    "the cat and the dog and the cat and the dog and the",
    "She was happy. He was happy. They were happy. She was",
]
LENGTH = 60
EVERYTHING = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ARCHIVE = {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_spec_factor": 2.0}
SUFFIX = ARCHIVE | {"suffix_decoding_max_cached_requests": 0}
"""No request learns of another: how many drafts one has does not depend on those before it."""
ORDINARY = {"num_gpu_blocks_override": 257}
WORLDS = {
    "chunked": {**ORDINARY, "max_num_batched_tokens": 12, "max_num_seqs": 12},
    "preempted": {"num_gpu_blocks_override": 13, "max_num_seqs": 12, "max_model_len": 128},
    "swapped": {
        "num_gpu_blocks_override": 13,
        "max_num_seqs": 12,
        "max_model_len": 128,
        "preemption_mode": "swap",
        "swap_space": 0.01,
    },
    "overlapping": {**ORDINARY, "async_scheduling": True},
    "without cached prefixes": {**ORDINARY, "enable_prefix_caching": False},
    "over a cache of bfloat16": {**ORDINARY, "kv_cache_dtype": "bfloat16"},
    "over a cache of int8": {**ORDINARY, "kv_cache_dtype": "int8_per_token_head"},
}
CELLS = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.7, "seed": 7},
    "top_p": {"temperature": 0.9, "top_p": 0.6, "seed": 3},
    "top_k and min_p": {"temperature": 0.8, "top_k": 8, "min_p": 0.05, "seed": 5},
    "top_n_sigma": {"temperature": 0.8, "top_n_sigma": 1.0, "seed": 11},
    # What is drawn from is compared too: most mistakes change no token, but all change a logarithm.
    "penalties": {
        "temperature": 0,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.05,
        "repetition_penalty": 1.01,
        "logprobs": 5,
    },
    "bad words": {
        "temperature": 0,
        "logprobs": 5,
        "bad_words": [
            " Tom had",
            " had a",
            " a red",
            " girl named",
            " named Lily",
            " cat and",
            " was happy",
            " very proud",
        ],
    },
    "bias": {"temperature": 0.6, "seed": 1, "logit_bias": {5: 0.5, 9: -1.0}},
    "allowed ids": {"temperature": 0.5, "seed": 2, "allowed_token_ids": list(range(3, 400))},
    "min_tokens": {"temperature": 0, "min_tokens": 30, "stop_token_ids": list(range(10, 200, 3))},
    "stop ids": {"temperature": 0.5, "seed": 13, "stop_token_ids": list(range(10, 100, 9))},
    "logprobs": {"temperature": 0.6, "seed": 4, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0, "logprobs": 0, "prompt_logprobs": 1},
    "samples": {"temperature": 0.6, "seed": 6, "n": 2},
    "stop strings": {
        "temperature": 0,
        "stop": ["ball. Tom", "park and", "dog and the"],
        "include_stop_str_in_output": True,
    },
    "past EOS": {"temperature": 0.4, "seed": 8, "ignore_eos": True},
}


@dataclass
class Pair:
    """The same engine without drafts and with."""

    plain: LLM
    speculative: LLM

    def compare(self, params, prompts=PROMPTS):
        """Run with and without; the drafts that ran and those that were accepted."""
        expected = self.plain.generate(prompts, params, use_tqdm=False)
        before = stats_of(self.speculative)
        got = self.speculative.generate(prompts, params, use_tqdm=False)
        after = stats_of(self.speculative)
        assert [facts(output) for output in got] == [facts(output) for output in expected]
        drafted, accepted = (after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens"))
        return drafted, accepted


def check_way_to_run(pair, world):
    """Requests of many kinds at once change no token, and what the world is there for happened."""
    params = [
        SamplingParams(max_tokens=LENGTH, **CELLS[cell])
        for cell in ("greedy", "random", "penalties", "bad words", "min_tokens", "logprobs", "samples", "past EOS")
    ]
    drafted, accepted = pair.compare(params, 2 * PROMPTS)
    assert 0 < accepted < drafted
    check_world(pair, world)


def check_world(pair, world):
    """What the world is there for happened."""
    stats = stats_of(pair.speculative)
    assert stats["num_preemptions"] > 0 or world not in ("preempted", "swapped")
    assert stats["num_swapped_out"] > 0 or world != "swapped"


def check_next_to_a_grammar(pair):
    """A request with a grammar has no drafts of a second model, and its neighbour has."""
    grammar = StructuredOutputsParams(regex=r"( the cat| and){1,8}\.")
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=grammar)
    assert pair.compare(params) == (0, 0)
    drafted, accepted = pair.compare([params, SamplingParams(temperature=0, max_tokens=LENGTH)], 2 * PROMPTS[:1])
    assert 0 < accepted <= drafted


def stats_of(llm):
    return llm.llm_engine.engine_core.core.scheduler.stats()


def facts(output):
    """All that a client can see, but for times."""
    samples = [
        (each.index, each.token_ids, each.text, each.finish_reason, each.stop_reason, logprobs_of(each.logprobs))
        for each in output.outputs
    ]
    return output.prompt_token_ids, logprobs_of(output.prompt_logprobs), samples


def logprobs_of(places):
    if places is None:
        return None
    return [
        place and {token_id: (each.logprob, each.rank, each.decoded_token) for token_id, each in place.items()}
        for place in places
    ]


def make(speculative_config, **engine):
    return LLM(**({"max_model_len": 256} | engine), batch_invariant=True, speculative_config=speculative_config)


def pair_of(speculative_config=EVERYTHING, *, adaptive=False, **engine):
    return Pair(make(None, **engine), make({**speculative_config, "adaptive": adaptive}, **engine))
