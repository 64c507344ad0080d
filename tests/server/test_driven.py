"""``Driven``: a coroutine without a task ends, fails, is given up, and waits for what ASGI lets it wait for."""

import asyncio

import pytest

from rustvllm.server.stream.driven import Driven


@pytest.fixture
def ends():
    return []


async def returns():
    return 5


async def raises():
    raise OSError("broken")


async def test_what_need_not_wait_ends_at_once(ends):
    assert Driven(returns(), ends.append).is_done
    assert ends == [None]


async def test_what_raises_says_so_at_once(ends):
    assert Driven(raises(), ends.append).is_done
    assert [str(error) for error in ends] == ["broken"]


@pytest.mark.parametrize("waits", ["event", "future", "yield", "nested"])
async def test_it_goes_on_when_what_it_waits_for_is_there(ends, waits):
    event, future, seen = asyncio.Event(), asyncio.get_running_loop().create_future(), []

    async def wait():
        seen.append("began")
        if waits == "event":
            await event.wait()
        elif waits == "future":
            seen.append(await future)
        elif waits == "yield":
            await asyncio.sleep(0)
        else:
            await asyncio.gather(future, asyncio.ensure_future(event.wait()))
        seen.append("went on")

    driven = Driven(wait(), ends.append)
    assert seen == ["began"]
    assert not driven.is_done
    event.set()
    future.set_result("value")
    async with asyncio.timeout(5):
        while not driven.is_done:  # noqa: ASYNC110 -- there is no signal
            await asyncio.sleep(0)
    assert seen[-1] == "went on"
    assert ("value" in seen) == (waits == "future")
    assert ends == [None]


async def test_a_failed_future_is_raised_inside(ends):
    future = asyncio.get_running_loop().create_future()

    async def wait():
        try:
            await future
        except ValueError:
            raise OSError("of a ValueError") from None

    driven = Driven(wait(), ends.append)
    future.set_exception(ValueError())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert driven.is_done
    assert [str(error) for error in ends] == ["of a ValueError"]


async def test_given_up_it_cleans_up_and_calls_nothing(ends):
    event, cleaned = asyncio.Event(), []

    async def wait():
        try:
            await event.wait()
        finally:
            cleaned.append(True)

    driven = Driven(wait(), ends.append)
    driven.close()
    driven.close()
    event.set()
    await asyncio.sleep(0)
    assert (driven.is_done, cleaned, ends) == (True, [True], [])
