"""``EventWriter``: order, a client that does not read, a broken connection, silence. ``send`` stands for a server's."""

import asyncio
import random

import pytest

from rustvllm.server.stream.event_writer import KEEP_ALIVE_COMMENT, EventWriter


class Client:
    """A client behind an ASGI server that lets ``send`` wait while the client does not read."""

    def __init__(self):
        self.readable = asyncio.Event()
        self.readable.set()
        self.messages = []
        self.error = None
        self.yields = False

    async def send(self, message):
        if self.yields:
            await asyncio.sleep(0)
        await self.readable.wait()
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    async def begin(self):
        await self.send({"type": "http.response.start"})

    @property
    def body(self):
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def ended(self):
        return bool(self.messages) and self.messages[-1].get("more_body") is False


class Reader:
    """Counts how often the writer asked for more."""

    def __init__(self):
        self.asked = 0

    def __call__(self):
        self.asked += 1


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def writer(client, reader):
    writer = EventWriter(reader)
    yield writer
    writer.close()


async def test_the_response_begins_with_the_first_event(writer, client):
    writer.attach(client.begin, client.send)
    await asyncio.sleep(0)
    assert not writer.is_started
    assert client.messages == []
    assert writer.write(b"a")
    assert writer.is_started
    assert [message["type"] for message in client.messages] == ["http.response.start", "http.response.body"]
    assert writer.write(b"b")
    await writer.finish(b"c")
    assert client.body == b"abc"
    assert client.ended


async def test_what_comes_before_it_is_attached_is_kept(writer, client, reader):
    assert not writer.write(b"a")
    assert not writer.write(b"b")
    writer.attach(client.begin, client.send)
    assert client.body == b"ab"
    assert reader.asked == 1
    assert writer.write(b"c")
    assert client.body == b"abc"


async def test_a_client_that_does_not_read_is_waited_for(writer, client, reader):
    writer.attach(client.begin, client.send)
    assert writer.write(b"a")
    client.readable.clear()
    assert not writer.write(b"b"), "it waits"
    assert not writer.write(b"c")
    last = asyncio.ensure_future(writer.finish(b"d"))
    await asyncio.sleep(0.01)
    assert client.body == b"a"
    assert reader.asked == 1
    client.readable.set()
    async with asyncio.timeout(5):
        await last
    assert client.body == b"abcd"
    assert client.ended
    assert reader.asked == 2


async def test_a_slow_beginning_keeps_the_order(writer, client):
    client.readable.clear()
    writer.attach(client.begin, client.send)
    assert not writer.write(b"a")
    assert not writer.write(b"b")
    client.readable.set()
    async with asyncio.timeout(5):
        await writer.finish(b"c")
    assert client.messages[0]["type"] == "http.response.start"
    assert client.body == b"abc"


@pytest.mark.parametrize("yields", [False, True])
async def test_random_events_arrive_in_order(writer, client, yields):
    """Writes, sends and pauses of the client at random; the body is what was written, in order, once."""
    client.yields = yields
    choose = random.Random(7)
    expected = b""
    writer.attach(client.begin, client.send)
    async with asyncio.timeout(20):
        for index in range(500):
            event = b"%d," % index
            expected += event
            action = choose.randrange(6)
            if action == 0:
                client.readable.clear()
            elif action == 1:
                client.readable.set()
            if action == 2:
                client.readable.set()
                await writer.send(event)
            else:
                writer.write(event)
            if action == 3:
                await asyncio.sleep(0)
        client.readable.set()
        await writer.finish(b"end")
    assert client.body == expected + b"end"
    assert client.ended


@pytest.mark.parametrize("when", ["at once", "after waiting"])
async def test_a_broken_connection_is_raised_to_who_waits(writer, client, reader, when):
    writer.attach(client.begin, client.send)
    assert writer.write(b"a")
    asked = reader.asked
    client.error = ConnectionResetError("gone")
    if when == "after waiting":
        client.readable.clear()
    assert not writer.write(b"b")
    sending = asyncio.ensure_future(writer.send(b"c"))
    await asyncio.sleep(0)
    client.readable.set()
    with pytest.raises(ConnectionResetError, match="gone"):
        await asyncio.wait_for(sending, 5)
    assert writer.failure is client.error
    assert client.body == b"a"
    await asyncio.sleep(0)
    assert reader.asked > asked, "who is not waiting has to hear of it, too"


async def test_closed_while_it_waits(writer, client):
    writer.attach(client.begin, client.send)
    writer.write(b"a")
    client.readable.clear()
    writer.write(b"b")
    writer.close()
    client.readable.set()
    await asyncio.sleep(0.01)
    assert client.body == b"a"
    assert not writer.write(b"c")
    assert client.body == b"a"


async def test_silence_is_broken_by_comments(writer, client):
    writer.attach(client.begin, client.send, 0.01)
    async with asyncio.timeout(10):
        while len(client.messages) < 3:  # noqa: ASYNC110 -- there is no signal
            await asyncio.sleep(0.005)
    assert client.body.replace(KEEP_ALIVE_COMMENT, b"") == b""
    client.readable.clear()
    assert not writer.write(b"data: x\n\n")
    await asyncio.sleep(0.1)
    client.readable.set()
    await writer.send(b"data: y\n\n")
    assert client.body.replace(KEEP_ALIVE_COMMENT, b"") == b"data: x\n\ndata: y\n\n"
    assert client.body.count(KEEP_ALIVE_COMMENT) < 8, "a client that does not read gets no comments to catch up on"
