"""Long texts in the pool: the same ids, the event loop continues, and cancelled texts leave nothing behind."""

import asyncio

import pytest

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError, QueueFullError
from rustvllm.text.tokenizer import Tokenizer
from rustvllm.text.tokenizer_pool import TokenizerPool

PATIENCE = 60
LONG = "the quick brown fox 日本語 🙂 " * 20_000


@pytest.fixture
def tokenizer(toy_model):
    return _core.Tokenizer.from_file(f"{toy_model}/tokenizer.json")


async def test_the_ids_are_those_of_the_tokenizer(tokenizer):
    pool = TokenizerPool(tokenizer)
    texts = [LONG[: 1 + 10_000 * n] for n in range(20)]
    encoded = await asyncio.wait_for(asyncio.gather(*(pool.encode(text) for text in texts)), PATIENCE)
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(text) for text in texts]
    assert pool.num_waiting_bytes == 0


async def test_the_loop_goes_on_meanwhile(tokenizer):
    pool = TokenizerPool(tokenizer)
    task = asyncio.create_task(pool.encode(LONG))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    assert len(task.result()) > len(LONG)


async def test_cancelled_texts_leave_nothing_and_others_come(tokenizer):
    pool = TokenizerPool(tokenizer)
    tasks = [asyncio.create_task(pool.encode(LONG)) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[:5]:
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True] * 5 + [False]
    assert results[5].tolist() == tokenizer.encode(LONG)
    assert pool._loop is None
    async with asyncio.timeout(PATIENCE):
        while pool.num_waiting_bytes:  # noqa: ASYNC110 -- a worker thread's doing
            await asyncio.sleep(0.01)


async def test_bad_texts_and_too_much_text(tokenizer):
    pool = TokenizerPool(tokenizer)
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        await pool.encode("a\ud800" * 5000)
    with pytest.raises(QueueFullError, match="limit of 268435456"):
        await pool.encode("x" * ((256 << 20) + 1))
    assert pool._loop is None
    assert (await pool.encode("ab")).tolist() == [97, 98]


def test_one_loop_after_the_other(tokenizer):
    pool = TokenizerPool(tokenizer)
    for _ in range(2):
        assert asyncio.run(pool.encode("ab" * 3000)).tolist() == [97, 98] * 3000

    async def leave_open():
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await pool.encode(LONG)

    loop = asyncio.new_event_loop()
    task = loop.create_task(leave_open())
    loop.run_forever()
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(pool.encode("ab"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    assert asyncio.run(pool.encode("ab")).tolist() == [97, 98]


@pytest.mark.parametrize(("prefix", "suffix"), [(True, False), (False, True), (True, True), (False, False)])
async def test_a_tokenizer_with_affixes_of_its_own(tokenizer, prefix, suffix):
    config = {"bos_token": "<eos>", "eos_token": "<eos>", "add_bos_token": prefix, "add_eos_token": suffix}
    ours = Tokenizer(tokenizer, config)
    text = "ab" * 2000
    for special in (True, False):
        expected = ours.encode(text, special)
        assert (await ours.encode_off_loop(text, special)).tolist() == expected
        assert ours.encode_ids(text, special).tolist() == expected


class TestTokenIds:
    def test_it_is_a_sequence(self):
        ids = _core.TokenIds([3, 1, 2])
        assert (list(ids), len(ids), ids[0], ids[-1], ids.largest()) == ([3, 1, 2], 3, 3, 2, 3)
        assert (ids[1:], ids[::-1], ids[:0]) == ([1, 2], [2, 1, 3], [])
        assert ids == _core.TokenIds(ids)
        assert ids != [3, 1]
        assert ids != "x"
        assert _core.TokenIds([]).largest() == -1
        for index in (3, -4):
            with pytest.raises(IndexError):
                ids[index]

    @pytest.mark.parametrize("ids", [[True], [1.0], ["1"], [-1], [10], [2**40], [None], (1,), "1", [[1]]])
    def test_anything_but_ids_is_refused(self, ids):
        with pytest.raises(ValueError, match="id"):
            _core.TokenIds(ids, 10)
