"""``QueryQueue``: questions between threads of one process; each gets an answer or an error."""

import threading

import pytest

from rustvllm.exceptions import EngineDeadError, QueryError, QueryTimeoutError
from rustvllm.observe.inspect.queries import MAX_OPEN_QUERIES, QueryQueue


def asking(queue, outcomes):
    def ask():
        try:
            outcomes.append(queue.ask("state", b"?", 20))
        except QueryError as error:
            outcomes.append(error)
        except EngineDeadError as error:
            outcomes.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_an_answer_finds_the_asking_thread():
    woken = threading.Event()
    queue, outcomes = QueryQueue(woken.set), []
    assert queue.take_queries() == ()
    thread = asking(queue, outcomes)
    assert woken.wait(20)
    (query,) = queue.take_queries()
    assert (query.kind, query.payload, queue.take_queries()) == ("state", b"?", ())
    query.answer(b"!")
    thread.join(20)
    assert outcomes == [b"!"]


def test_a_failure_and_the_end_are_told():
    woken = threading.Semaphore(0)
    queue, outcomes = QueryQueue(woken.release), []
    thread = asking(queue, outcomes)
    assert woken.acquire(timeout=20)
    queue.take_queries()[0].fail("no")
    thread.join(20)
    thread = asking(queue, outcomes)
    assert woken.acquire(timeout=20)
    queue.close("the engine died: boom")
    thread.join(20)
    assert [type(each) for each in outcomes] == [QueryError, EngineDeadError]
    with pytest.raises(EngineDeadError, match="boom"):
        queue.ask("state", b"", 20)


def test_only_so_many_wait_and_late_answers_do_no_harm():
    queue = QueryQueue(lambda: None)
    for _ in range(MAX_OPEN_QUERIES):
        with pytest.raises(QueryTimeoutError, match=r"within 0\.001 s"):
            queue.ask("state", b"", 0.001)
    with pytest.raises(QueryError, match="8 queries have no answer yet"):
        queue.ask("state", b"", 20)
    for query in queue.take_queries():
        query.answer(b"late")
    with pytest.raises(QueryTimeoutError):  # there is room again
        queue.ask("state", b"", 0.001)
