"""Lines arrive in order; if the reader is slow or gone, lines are dropped and the log says how many."""

import os
import threading
import time

import pytest

from rustvllm.process.output import output_queue
from rustvllm.process.output.output_queue import LIMIT_BYTES, PIECE_OVERHEAD_BYTES, OutputQueue


class Pipe:
    """A pipe with a queue that writes to it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.other_writer = os.dup(self.writer)
        self.queue = OutputQueue(self.writer, lambda message: f"notice: {message}\n")

    def fill(self) -> int:
        """Fill the pipe; returns the bytes that this took."""
        count = 0
        try:
            while True:
                count += os.write(self.writer, b"." * 4096)
        except BlockingIOError:
            return count

    def read(self, end: bytes) -> bytes:
        """Read from the pipe until these bytes come; returns everything read."""
        text = b""
        while not text.endswith(end):
            text += os.read(self.reader, 1 << 16)
        return text

    def close(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
        assert self.queue.drain(10)  # it fails at once without a reader
        os.close(self.writer)
        os.close(self.other_writer)


@pytest.fixture
def pipe():
    found = Pipe()
    yield found
    found.close()


def test_a_line_is_in_the_pipe_when_put_returns(pipe):
    pipe.queue.put(b"one\n")
    pipe.queue.put(b"two\n")
    os.set_blocking(pipe.reader, False)
    assert os.read(pipe.reader, 100) == b"one\ntwo\n"


def test_only_this_opening_of_a_pipe_does_not_wait(pipe):
    assert os.get_blocking(pipe.writer) is False
    assert os.get_blocking(pipe.other_writer) is True


def test_lines_of_many_threads_stay_whole(pipe):
    def write(name: str) -> None:
        for number in range(500):
            pipe.queue.put(f"{name} {number} {'x' * 100}\n".encode())

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    lines = []
    while len(lines) < 2000:
        lines += pipe.read(b"\n").decode().splitlines()
    for thread in threads:
        thread.join()
    for name in "abcd":
        assert [line for line in lines if line[0] == name] == [f"{name} {n} {'x' * 100}" for n in range(500)]


def test_a_full_pipe_holds_up_no_writer_and_what_is_dropped_is_told_in_its_place(pipe):
    filled = pipe.fill()
    size = 1000
    fits = LIMIT_BYTES // (size + PIECE_OVERHEAD_BYTES)
    for number in range(fits + 300):
        pipe.queue.put(f"{number:0{size - 1}}\n".encode())
    assert not pipe.queue.drain(0.01)
    text = pipe.read(b"written\n")[filled:]
    kept = b"".join(f"{number:0{size - 1}}\n".encode() for number in range(fits))
    assert text.startswith(kept)
    notice = text.removeprefix(kept)
    assert notice == b"notice: 300 log lines were dropped: they were not read as fast as they were written\n"
    pipe.queue.put(b"later\n")
    assert pipe.read(b"later\n") == b"later\n"


def test_a_notice_stands_before_the_lines_after_it(pipe):
    pipe.fill()
    large = b"y" * LIMIT_BYTES + b"\n"
    pipe.queue.put(large)  # alone it may be larger than what may wait
    pipe.queue.put(b"dropped\n")
    taken = b""
    while len(taken) < LIMIT_BYTES // 2:
        taken += os.read(pipe.reader, 1 << 16)
    deadline = time.monotonic() + 10
    while pipe.queue._waiting_bytes > LIMIT_BYTES - 1000:  # what it has written makes room
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pipe.queue.put(b"after\n")
    rest = pipe.read(b"after\n")
    assert (
        rest[rest.index(b"\n") + 1 :]
        == b"notice: 1 log line was dropped: they were not read as fast as they were written\nafter\n"
    )


def test_a_reader_that_is_gone_makes_nothing_fail(pipe):
    os.close(pipe.reader)
    pipe.reader = -1
    for _ in range(100):
        pipe.queue.put(b"line\n")
    assert pipe.queue.drain(1)


def test_a_collector_that_comes_back_is_told_what_it_missed(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    queue = OutputQueue(writer, lambda message: f"notice: {message}\n")
    os.close(reader)
    queue.put(b"one\n")
    queue.put(b"two\nthree\n")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    queue.put(b"four\n")
    assert queue.drain(10)
    assert os.read(reader, 1000) == b"notice: 3 log lines were dropped: Broken pipe\nfour\n"
    os.close(reader)
    os.close(writer)


def test_a_disk_that_was_full_is_told_of_when_it_is_not(tmp_path):
    descriptor = os.open("/dev/full", os.O_WRONLY)
    queue = OutputQueue(descriptor, lambda message: f"notice: {message}\n")
    for text in (b"one\n", b"two\n"):
        queue.put(text)
        assert queue.drain(10)
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, descriptor)
    queue.put(b"three\n")
    assert queue.drain(10)
    text = (tmp_path / "log").read_text()
    assert text == "notice: 2 log lines were dropped: No space left on device\nthree\n"
    os.close(file)
    os.close(descriptor)


def test_a_line_that_was_cut_off_is_not_joined_with_the_next(pipe, monkeypatch):
    answers = iter([3, OSError(28, "No space left on device")])
    write = os.write

    def short(descriptor: int, text: bytes) -> int:
        answer = next(answers, None)
        if isinstance(answer, OSError):
            raise answer
        return write(descriptor, text[:answer])

    monkeypatch.setattr(output_queue.os, "write", short)
    pipe.queue.put(b"first\n")
    pipe.queue.put(b"second\n")
    assert pipe.read(b"second\n") == b"fir\nnotice: 1 log line was dropped: No space left on device\nsecond\n"


def test_a_signal_handler_may_write_while_the_thread_it_interrupts_does(pipe):
    with pipe.queue._changed:  # as within put()
        pipe.queue.put(b"from the handler\n")
        assert pipe.queue.drain(1)
    assert pipe.read(b"\n") == b"from the handler\n"
