"""Every parameter of sampling at once, from the rows to the ids, against the float64 reference step by step."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_schedule import DEFAULTS, FLOAT_COLUMNS, INT_COLUMNS, buffer_spec

from rustvllm import _core
from rustvllm.sample.processor_batch import Failure
from rustvllm.sample.sampler import NOTHING_LEFT, Sampler
from rustvllm.sampling_params.table import FILTERS
from rustvllm.worker.input_batch import InputBatch
from rustvllm.worker.step_buffers import StepBuffers

sys.path.insert(0, str(Path(__file__).parents[1] / "sample"))
import reference

ROWS, VOCAB = 6, 13
IDS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 1000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.77]),
        "min_p": st.sampled_from([0.0, 0.0, 0.21]),
        "top_n_sigma": st.sampled_from([0.0, 0.0, 0.37, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.7]),
        "min_tokens": st.sampled_from([0, 0, 2]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)
RULES = st.fixed_dictionaries(
    {
        "bias": st.dictionaries(IDS, st.sampled_from([-100.0, -1.25, 0.5, 100.0]), max_size=3),
        "allowed": st.one_of(st.just([]), st.lists(IDS, min_size=1, max_size=6, unique=True)),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    }
)


class Requests:
    """Rows of one batch, filled and emptied as a scheduler would."""

    def __init__(self, vocab_size=VOCAB):
        self.batch = InputBatch(
            max_num_seqs=ROWS,
            max_blocks_per_seq=1,
            vocab_size=vocab_size,
            device=torch.device("cpu"),
            float_columns=FLOAT_COLUMNS,
            int_columns=INT_COLUMNS,
        )
        self.step = StepBuffers(buffer_spec(ROWS, 8, 1))
        self.rows = {}
        self.batch.token_ids = lambda row: self.rows[row].prompt + self.rows[row].output
        self.batch.extras.of_row = lambda row: self.rows[row].extras

    def update(self, new=(), finished=(), preempted=()):
        arrays, rows = self.step.arrays, [request.row for request in new]
        for name, left in (("finished_rows", finished), ("preempted_rows", preempted)):
            arrays[name][: len(left)] = left
            for row in left:
                del self.rows[row]
        self.rows.update({request.row: request for request in new})
        arrays["new_rows"][: len(rows)] = rows
        arrays["stop_indptr"][0] = 0
        for index, request in enumerate(new):
            params = DEFAULTS | request.params
            params |= {"num_prompt_tokens": len(request.prompt), "has_extras": int(request.extras is not None)}
            arrays["sampling_float"][index] = [params[name] for name in FLOAT_COLUMNS]
            arrays["sampling_int"][index] = [params[name] for name in INT_COLUMNS]
            start = arrays["stop_indptr"][index]
            stop_ids = request.stop_ids if params["min_tokens"] else []
            arrays["stop_token_ids"][start : start + len(stop_ids)] = stop_ids
            arrays["stop_indptr"][index + 1] = start + len(stop_ids)
        self.batch.update(
            SimpleNamespace(
                num_finished=len(finished),
                num_preempted=len(preempted),
                num_new_reqs=len(new),
                num_block_table_updates=0,
            ),
            self.step,
        )

    def sample(self, order, logits):
        """Ids of the rows in ``order``, remembered as the runner remembers them."""
        rows = np.array(order, np.int32)
        positions = [len(self.rows[row].prompt) + len(self.rows[row].output) for row in order]
        metadata = self.batch.sampling_metadata(rows, np.array(positions, np.int32), self.step)
        ids = Sampler().sample(logits.clone(), metadata)
        self.batch.count(rows, ids.clamp(min=0))
        for row, token in zip(order, ids.tolist(), strict=True):
            self.rows[row].output.append(token)
        return ids.tolist()


def request(row, prompt=(1, 2), output=(), *, params=None, stop_ids=(), bias=None, allowed=(), bad_words=(), **more):
    given_any = bias or allowed or bad_words or more
    extras = _core.SamplingExtras(
        logit_bias=list((bias or {}).items()), allowed_token_ids=list(allowed), bad_words=list(bad_words), **more
    )
    return SimpleNamespace(
        row=row,
        prompt=list(prompt),
        output=list(output),
        params=params or {},
        stop_ids=list(stop_ids),
        extras=extras if given_any else None,
        rules={"bias": (bias or {}).items(), "allowed": allowed, "bad_words": bad_words},
    )


def expected_token(request, logits):
    params = DEFAULTS | request.params
    too_short = len(request.output) < params["min_tokens"]
    logits = reference.ruled(logits, request.output, stop_ids=request.stop_ids if too_short else (), **request.rules)
    penalties = (params[name] for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"))
    logits = reference.penalised(logits, request.prompt, request.output, *penalties)
    return reference.choose(
        logits,
        params["temperature"],
        params["seed"],
        len(request.prompt) + len(request.output),
        **{
            each.name: params[each.name] if each.is_integer else float(np.float32(params[each.name]))
            for each in FILTERS
        },
    )


@settings(max_examples=60)
@given(st.data())
def test_any_mixture_equals_the_reference(data):
    """Requests come, wait, are preempted and come back in another row; each is sampled as if it were alone."""
    requests, generator = Requests(), torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    waiting = [
        request(
            None,
            data.draw(st.lists(IDS, min_size=1, max_size=4)),
            params=data.draw(PARAMS),
            stop_ids=data.draw(st.lists(IDS, max_size=2, unique=True)),
            **data.draw(RULES),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    for _ in range(4):
        leaving = [row for row in requests.rows if data.draw(st.integers(0, 4)) == 0]
        waiting += (left := [requests.rows[row] for row in leaving])
        free = [row for row in range(ROWS) if row not in requests.rows or row in leaving]
        new = [each for each in waiting if each not in left and data.draw(st.booleans())]
        for each in new:
            each.row = free.pop(data.draw(st.integers(0, len(free) - 1)))
            waiting.remove(each)
        requests.update(new, preempted=leaving)
        order = data.draw(st.permutations(sorted(requests.rows)))[: data.draw(st.integers(1, ROWS))]
        if not order:
            continue
        logits = torch.randn(len(order), VOCAB, generator=generator) * 3
        # What the reference sees is before the output grows.
        wanted = [expected_token(requests.rows[row], logits[i].tolist()) for i, row in enumerate(order)]
        assert requests.sample(order, logits) == wanted
        ended = [row for row in order if requests.rows[row].output[-1] < 0]
        for row in ended:
            requests.rows[row].output.pop()
        requests.update(finished=ended)


def test_a_word_of_several_tokens_blocks_its_last_one_behind_the_others_in_the_output():
    requests = Requests()
    words = [[1, 2, 3], [7], [4, 5]]
    # The prompt ends with the beginning of a word, which does not count.
    requests.update([request(0, [1, 2], bad_words=words), request(3, [9], [4], bad_words=[[4, 5]])])
    logits = torch.zeros(2, VOCAB)

    def step(*wanted):
        for row, token in enumerate(wanted):
            logits[row] = 0
            logits[row, token] = 1
        return requests.sample([0, 3], logits)

    assert step(3, 5) == [3, 0]  # the other had 4 before it came: 5 is blocked
    assert step(1, 4) == [1, 4]
    assert step(2, 4) == [2, 4]
    assert step(3, 5) == [0, 0]
    assert step(3, 5) == [3, 5]
    assert step(7, 7) == [0, 7]


def test_words_that_share_their_last_token_do_not_undo_each_other():
    requests = Requests()
    requests.update([request(0, [9], [1], bad_words=[[1, 3], [2, 3], [5, 6, 3]])])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 5
    assert requests.sample([0], logits) == [0]
    requests.rows[0].output[:] = [1, 8]
    assert requests.sample([0], logits) == [3]


def test_a_longer_word_that_comes_later_leaves_earlier_rows_what_they_remember():
    requests = Requests()
    requests.update([request(0, [9], [4], bad_words=[[4, 5]])])
    requests.update([request(1, [9], [1, 2, 3, 4], bad_words=[[1, 2, 3, 4, 5]])])
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 1
    assert requests.sample([0, 1], logits) == [0, 0]
    assert requests.sample([0, 1], logits) == [5, 5]


def test_a_row_given_to_another_request_keeps_no_rules():
    requests = Requests()
    requests.update([request(0, allowed=[3]), request(1, bias={4: 100.0})])
    logits = torch.zeros(2, VOCAB)
    assert requests.sample([0, 1], logits) == [3, 4]
    requests.update([request(0), request(1)], finished=[0], preempted=[1])
    assert requests.sample([0, 1], logits) == [0, 0]
    assert requests.batch.extras.rules.is_empty


def test_rows_without_extras_ask_for_nothing():
    requests = Requests()
    requests.batch.extras.of_row = None  # would raise if it were called
    requests.update([request(0), request(1, params={"temperature": 1.0})])
    rows = np.array([0, 1], np.int32)
    metadata = requests.batch.sampling_metadata(rows, np.array([2, 2], np.int32), requests.step)
    assert metadata.rules is None
    assert metadata.processors is None


def test_an_id_outside_the_vocabulary_ends_its_own_request():
    """A front end refuses it; one of another release might not."""
    requests = Requests()
    wrong = [{"allowed": [VOCAB]}, {"bias": {VOCAB + 7: 1.0}}, {"bad_words": [[1, VOCAB]]}]
    requests.update([request(0), *(request(row, **rules) for row, rules in enumerate(wrong, 1))])
    rows = np.arange(4, dtype=np.int32)
    metadata = requests.batch.sampling_metadata(rows, np.full(4, 2, np.int32), requests.step)
    assert Sampler().sample(torch.zeros(4, VOCAB), metadata).tolist() == [0, -4, -4, -4]
    assert sorted(metadata.processors.failures) == [1, 2, 3]
    failure = metadata.processors.failures[2]
    assert failure == Failure("logit_bias holds the token id 20, the vocabulary is 0 to 12", is_refusal=True)


def test_nothing_left_to_sample_has_an_id_of_its_own():
    requests = Requests()
    requests.update([request(0, allowed=[3], bad_words=[[3]]), request(1, params={"temperature": 1.0}, allowed=[3])])
    assert requests.sample([0, 1], torch.zeros(2, VOCAB)) == [NOTHING_LEFT, 3]
