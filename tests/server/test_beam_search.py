"""``use_beam_search`` over HTTP with a real model: the choices are the beams, best first, and as ``LLM`` finds them."""

import pytest
from asgi_client import assert_error, client_of

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.server.state import ServerState

OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "num_gpu_blocks_override": 100, "max_model_len": 128}
PROMPT = "Once upon a time"
BODY = {"prompt": PROMPT, "max_tokens": 12, "n": 4, "use_beam_search": True, "length_penalty": 0.5}


@pytest.fixture(scope="module")
def folder(shared_dir):
    return str(shared_dir / "data/stories260K/hf")


@pytest.fixture(scope="module")
def expected(folder):
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=12, length_penalty=0.5)
    with LLM(folder, **OPTIONS) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert [beam.logprobs for beam in output.outputs] == [None] * 4
    scores = [beam.cumulative_logprob / len(beam.token_ids) ** 0.5 for beam in output.outputs]
    assert scores == sorted(scores, reverse=True)
    assert len({beam.text for beam in output.outputs}) == 4
    return output.outputs


async def test_choices_are_the_beams_best_first(folder, expected):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS))
    state = ServerState(None)
    state.set_ready(engine)
    try:
        async with client_of(state) as client:
            answer = (await client.post("/v1/completions", json=BODY)).json()
            assert [choice["text"] for choice in answer["choices"]] == [beam.text for beam in expected]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
            assert answer["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in expected)

            shown = (await client.post("/v1/completions", json={**BODY, "logprobs": 0})).json()
            for choice, beam in zip(shown["choices"], expected, strict=True):
                assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(beam.cumulative_logprob, abs=1e-4)

            chat = {**BODY, "messages": [{"role": "user", "content": PROMPT}]}
            del chat["prompt"]
            answer = (await client.post("/v1/chat/completions", json=chat)).json()
            assert len({choice["message"]["content"] for choice in answer["choices"]}) == 4

            refused = await client.post("/v1/completions", json={**BODY, "stream": True})
            assert_error(refused, 400, "BadRequestError", param="stream", says=("use_beam_search cannot be streamed",))
            refused = await client.post("/v1/completions", json={**BODY, "n": 9})
            assert_error(refused, 400, "BadRequestError", param="n", says=("max_num_seqs = 8", "9"))
            metrics = (await client.get("/metrics")).text
            assert "vllm:generation_tokens_total" in metrics
    finally:
        state.close()
        engine.shutdown()
