"""The live page in a real browser: a key, an idle engine, a chat with its journey, a stop, an engine that dies."""

import itertools
import json
from collections.abc import Iterator

import httpx
import pytest
from chromium import Chromium, find_chromium
from server_process import REAL, ServerProcess

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--restart-engine", "--num-gpu-blocks-override", "400"]
    with ServerProcess([*REAL, *flags], RUSTVLLM_API_KEY="secret") as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def browser(server: ServerProcess) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM) as browser:
        browser.open(server.url + "/dashboard")
        yield browser


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(browser: Chromium) -> None:
    browser.wait_for("!document.querySelector('#key-form').hidden")
    browser.type("#key", "wrong")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#key').value === ''")
    browser.wait_for("!document.querySelector('#key-form').hidden && !sessionStorage.getItem('rustvllm-key')")
    browser.type("#key", "secret")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#status').textContent === 'idle'")
    assert browser.evaluate("document.querySelector('#key-form').hidden")
    assert browser.evaluate("document.cookie") == ""
    assert "secret" not in browser.evaluate("JSON.stringify(localStorage)")
    assert browser.text("#model") == "rustvllm-tiny"
    assert browser.evaluate("!document.querySelector('#idle').hidden"), "nothing runs, and it says so"
    assert "400 of 16 tokens" in browser.text("#blocks-count")


def test_a_chat_streams_next_to_its_journey(browser: Chromium) -> None:
    browser.evaluate("document.querySelector('#max_tokens').value = 12, document.querySelector('#seed').value = 7")
    browser.type("#prompt", "Tell me a <b>story</b> about a fox.")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#usage').textContent.includes('tokens/s')")
    turns = browser.evaluate("[...document.querySelectorAll('.turn')].map((turn) => turn.lastChild.data)")
    assert turns[0] == "Tell me a <b>story</b> about a fox.", "text is text"
    browser.wait_for("document.querySelector('#journey-rows').textContent.includes('finished')")
    rows = browser.evaluate(
        "[...document.querySelectorAll('#journey-rows tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert "enters the queue" in rows[0][2]
    assert "of the prompt" in rows[1][2]
    assert rows[-1][2].startswith("finished (")
    steps = rows[1:-1]
    tokens = [json.loads(row[2].partition(" → ")[2]) for row in steps]
    answer = turns[1]
    assert "".join(tokens).startswith(answer) or answer.startswith("".join(tokens)), (tokens, answer)
    counters = [tuple(map(int, row[3].split(" / "))) for row in steps]
    assert all(computed == known for computed, known in counters), "each step computes all that is known"
    assert all(after[0] == before[0] + 1 for before, after in itertools.pairwise(counters))
    assert all(cell.endswith(("µs", "ms", " s")) for row in steps for cell in row[5:9]), steps
    legend = browser.text("#stage-legend")
    assert all(stage in legend for stage in ("queue", "prompt", "generation"))


def test_a_request_that_is_stopped_is_aborted(browser: Chromium, server: ServerProcess) -> None:
    browser.click("#clear")
    browser.evaluate(
        "document.querySelector('#endpoint').value = 'completion', document.querySelector('#max_tokens').value = 480"
    )
    browser.type("#prompt", "Once upon a time")
    browser.press("Enter")
    browser.wait_for("(document.querySelectorAll('.turn')[1]?.lastChild.data ?? '').length > 10")
    browser.press("Escape")
    browser.wait_for("document.querySelector('#usage').textContent.includes('stopped here')")
    browser.wait_for("document.querySelector('#status').textContent === 'idle'")
    assert httpx.get(server.url + "/load", headers=KEY).json()["num_running"] == 0
    browser.wait_for("!document.querySelector('#send').disabled")


def test_what_the_server_refuses_is_said(browser: Chromium) -> None:
    browser.click("#clear")
    browser.evaluate("document.querySelector('#max_tokens').value = 100000")
    browser.type("#prompt", "Once")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.turn.error')?.textContent.includes('max_tokens')")
    browser.evaluate("document.querySelector('#max_tokens').value = 3")


def test_dark_and_light_and_by_keyboard(browser: Chromium) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    dark = browser.evaluate(background)
    browser.set_scheme("light")
    browser.wait_for(f"{background} !== {json.dumps(dark)}")
    browser.click("#theme")
    assert (browser.text("#theme-name"), browser.evaluate(background)) == ("dark", dark)
    browser.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(20):
        browser.press("Tab")
        reached.add(browser.evaluate("document.activeElement.id"))
    assert {"theme", "endpoint", "temperature", "prompt", "send"} <= reached


def test_an_engine_that_dies_is_told_and_its_successor_serves(browser: Chromium, server: ServerProcess) -> None:
    (engine,) = server.engines()
    engine.kill()
    browser.wait_for(
        "['restarting', 'dead'].some((word) => document.querySelector('#status').textContent.includes(word))"
    )
    browser.wait_for("document.querySelector('#status').textContent === 'idle'", timeout=90)
    browser.click("#clear")
    browser.type("#prompt", "Once upon")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#journey-rows').textContent.includes('finished')")
    assert browser.evaluate("document.querySelectorAll('.turn.error').length") == 0


def test_the_page_ran_without_an_error(browser: Chromium) -> None:
    """The last of the module: nothing that the page did was an error or against its policy."""
    wrong = [line for line in browser.console if line.startswith("uncaught") or "Content Security Policy" in line]
    assert wrong == []
    assert browser.evaluate(
        "performance.getEntriesByType('resource').every(({name}) => name.startsWith(location.origin))"
    )
