"""The persistent rows against a dictionary of requests, over random steps."""

import functools
import operator
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_schedule import DEFAULTS, FLOAT_COLUMNS, INT_COLUMNS, buffer_spec

from rustvllm.sampling_params.table import FILTERS
from rustvllm.worker.input_batch import InputBatch
from rustvllm.worker.step_buffers import StepBuffers

ROWS, BLOCKS, VOCAB = 6, 5, 11


def make_batch():
    return InputBatch(
        max_num_seqs=ROWS,
        max_blocks_per_seq=BLOCKS,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        float_columns=FLOAT_COLUMNS,
        int_columns=INT_COLUMNS,
    )


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.25]),
        "top_n_sigma": st.sampled_from([0.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "top_k": st.sampled_from([-1, 0, 3]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "min_tokens": st.integers(0, 3),
    }
)


@given(st.data())
def test_rows_are_what_their_requests_are(data):
    batch, rng = make_batch(), np.random.default_rng(data.draw(st.integers(0, 2**31)))
    requests = {}  # row -> request
    batch.token_ids = lambda row: requests[row].tokens
    step = StepBuffers(buffer_spec(ROWS, 8, BLOCKS))
    for _ in range(data.draw(st.integers(1, 6))):
        leaving = [row for row in requests if data.draw(st.booleans())]
        preempted = leaving[len(leaving) // 2 :]
        for row in leaving:
            del requests[row]
        new = [row for row in range(ROWS) if row not in requests and data.draw(st.booleans())]
        for row in new:
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 5))).tolist()
            output = rng.integers(0, VOCAB, int(rng.integers(0, 4))).tolist()
            params = DEFAULTS | data.draw(PARAMS) | {"num_prompt_tokens": len(prompt)}
            stop_ids = sorted(set(rng.integers(0, VOCAB, 3).tolist())) if params["min_tokens"] else []
            requests[row] = SimpleNamespace(params=params, stop_ids=stop_ids, tokens=prompt + output, blocks=[])
        grown = [row for row in requests if len(requests[row].blocks) < BLOCKS and data.draw(st.booleans())]
        updates = []
        for row in grown:
            start = len(requests[row].blocks)
            blocks = rng.integers(1, 1000, int(rng.integers(1, BLOCKS - start + 1))).tolist()
            requests[row].blocks += blocks
            updates.append((row, start, blocks))
        fill(step, leaving, preempted, new, requests, updates)
        output = SimpleNamespace(
            num_finished=len(leaving) - len(preempted),
            num_preempted=len(preempted),
            num_new_reqs=len(new),
            num_block_table_updates=len(updates),
        )
        batch.update(output, step)
        batch.write_block_table()
        check(batch, requests, rng, step)


def fill(step, leaving, preempted, new, requests, updates):
    for array in step.arrays.values():
        array[:] = -7
    arrays = {
        "finished_rows": leaving[: len(leaving) - len(preempted)],
        "preempted_rows": preempted,
        "new_rows": new,
        "sampling_float": [[requests[row].params[c] for c in FLOAT_COLUMNS] for row in new],
        "sampling_int": [[requests[row].params[c] for c in INT_COLUMNS] for row in new],
        "stop_indptr": np.cumsum([0] + [len(requests[row].stop_ids) for row in new]),
        "stop_token_ids": functools.reduce(operator.iadd, (requests[row].stop_ids for row in new), []),
        "bt_rows": [row for row, _, _ in updates],
        "bt_starts": [start for _, start, _ in updates],
        "bt_indptr": np.cumsum([0] + [len(blocks) for _, _, blocks in updates]),
        "bt_block_ids": functools.reduce(operator.iadd, (blocks for _, _, blocks in updates), []),
    }
    for name, values in arrays.items():
        if len(values):
            step.arrays[name][: len(values)] = values


def check(batch, requests, rng, step):
    for row, request in requests.items():
        assert batch.block_table[row, : len(request.blocks)].tolist() == request.blocks
    rows = rng.permutation(list(requests)).astype(np.int32)
    if not rows.size:
        return
    positions = np.array([len(requests[row].tokens) for row in rows.tolist()], np.int32)
    metadata = batch.sampling_metadata(rows, positions, step)
    asked = [requests[row] for row in rows.tolist()]
    random = [i for i, r in enumerate(asked) if r.params["temperature"] >= 1e-5]
    assert metadata.all_greedy == (not random)
    if random:
        assert metadata.random_rows.tolist() == random
        assert metadata.positions.tolist() == [len(asked[i].tokens) for i in random]
        assert metadata.seeds.tolist() == [asked[i].params["seed"] for i in random]
        assert metadata.temperature.tolist() == [asked[i].params["temperature"] for i in random]
        wanted = {number.name: [asked[i].params[number.name] for i in random] for number in FILTERS}
        wanted = {name: values for name, values in wanted.items() if set(values) != {DEFAULTS[name]}}
        assert {name: values.tolist() for name, values in metadata.filters.items()} == wanted
    masked = [
        (i, token)
        for i, r in enumerate(asked)
        if len(r.tokens) - r.params["num_prompt_tokens"] < r.params["min_tokens"]
        for token in r.stop_ids
    ]
    got = [] if metadata.masked_rows is None else list(
        zip(metadata.masked_rows.tolist(), metadata.masked_ids.tolist(), strict=True)
    )  # fmt: skip
    assert sorted(got) == sorted(masked)
    penalised = [i for i, r in enumerate(asked) if r.params["presence_penalty"]]
    assert (metadata.penalties is None) == (not penalised)
    if penalised:
        assert metadata.penalties.rows.tolist() == penalised
        p = metadata.penalties
        for i, counts, mask in zip(penalised, p.output_counts[p.slots], p.prompt_mask[p.slots], strict=True):
            num_prompt_tokens = asked[i].params["num_prompt_tokens"]
            expected = np.bincount(asked[i].tokens[num_prompt_tokens:], minlength=VOCAB)
            assert counts.tolist() == expected.tolist()
            assert mask.nonzero()[:, 0].tolist() == sorted(set(asked[i].tokens[:num_prompt_tokens]))
    # One more token each, as the runner does after sampling.
    sampled = rng.integers(0, VOCAB, rows.size)
    batch.count(rows, torch.from_numpy(sampled))
    for request, token in zip(asked, sampled.tolist(), strict=True):
        request.tokens.append(token)


def test_both_views_are_the_same_memory():
    step = StepBuffers([("idx_mapping", "int32", (4,)), ("b", "float32", (2, 3)), ("c", "int64", (1,))])
    step.arrays["idx_mapping"][:] = [1, 2, 3, 4]
    step.arrays["b"][1, 2] = 0.5
    assert step.tensors["idx_mapping"].tolist() == [1, 2, 3, 4]
    assert step.on_device("idx_mapping", 2).tolist() == [1, 2]
    assert step.tensors["b"][1, 2] == 0.5
    assert {array.dtype.name for array in step.arrays.values()} == {"int32", "float32", "int64"}
    assert all(array.flags.c_contiguous and array.flags.writeable for array in step.arrays.values())
