"""The live page in a real browser: a key, an idle engine, a chat with its journey, a stop, an engine that dies.

No test needs another: they may be dealt out to several processes, each of which has a server and a browser of its own.
"""

import itertools
import json
import time
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
def opened(server: ServerProcess) -> Iterator[Chromium]:
    """A browser whose page knows the key. Nothing that the page does is an error or against its policy."""
    assert PROGRAM is not None
    with Chromium(PROGRAM) as browser:
        browser.open(server.url + "/dashboard")
        give_key(browser)
        yield browser
        wrong = [line for line in browser.console if line.startswith("uncaught") or "Content Security Policy" in line]
        assert wrong == []
        assert browser.evaluate(
            "performance.getEntriesByType('resource').every(({name}) => name.startsWith(location.origin))"
        )


@pytest.fixture
def browser(opened: Chromium) -> Chromium:
    """The open page, with the playground as it is at first."""
    opened.click("#clear")
    values = {"endpoint": "chat", "max_tokens": "", "schema": "", "seed": "7", "prompt": ""}
    opened.evaluate(
        f"Object.entries({json.dumps(values)}).forEach(([id, value]) => document.getElementById(id).value = value)"
    )
    return opened


def give_key(browser: Chromium) -> None:
    """Type the key into the form that asks for it."""
    browser.wait_for("!document.querySelector('#key-form').hidden")
    browser.type("#key", "secret")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#status').textContent === 'idle'")


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(server: ServerProcess) -> None:
    assert PROGRAM is not None
    with Chromium(PROGRAM) as browser:
        browser.open(server.url + "/dashboard")
        browser.wait_for("!document.querySelector('#key-form').hidden")
        browser.type("#key", "wrong")
        browser.press("Enter")
        browser.wait_for("document.querySelector('#key').value === ''")
        browser.wait_for("!document.querySelector('#key-form').hidden && !sessionStorage.getItem('rustvllm-key')")
        give_key(browser)
        assert browser.evaluate("document.querySelector('#key-form').hidden")
        assert browser.evaluate("document.cookie") == ""
        assert "secret" not in browser.evaluate("JSON.stringify(localStorage)")
        assert browser.text("#model") == "rustvllm-tiny"
        assert browser.evaluate("!document.querySelector('#idle').hidden"), "nothing runs, and it says so"
        assert "400 of 16 tokens" in browser.text("#blocks-count")


def test_a_chat_streams_next_to_its_journey(browser: Chromium) -> None:
    browser.evaluate("document.querySelector('#max_tokens').value = 12")
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


def test_the_ranks_of_a_model_on_several_are_listed(browser: Chromium) -> None:
    assert browser.evaluate("document.querySelector('#ranks').hidden"), "this one has one"
    ranks = [
        {"rank": 0, "pid": 811, "state": "running", "step_age": 0, "waits_in": "", "collectives": 7},
        {"rank": 1, "pid": 812, "state": "stopped", "step_age": 2.5, "waits_in": "all_reduce", "collectives": 6},
    ]
    # What the page's own functions make of it, in one call: the next state of the server hides the line again.
    body = (
        "const source = [...document.scripts].map((each) => each.textContent).join('');"
        "const cut = (name) => source.match(new RegExp(`function ${name}\\\\([^]*?\\n}`))[0];"
        "const byId = 'const byId = (id) => document.getElementById(id);';"
        "new Function('engines', byId + cut('element') + cut('showRanks') + 'showRanks(engines)')"
        f"([{{rank: 0, state: {{ranks: {json.dumps(ranks)}}}}}]);"
        "return [...document.querySelector('#ranks').children].map((each) =>"
        " [each.textContent, each.dataset.state, each.title]);"
    )
    found = browser.evaluate(f"(() => {{ {body} }})()")
    assert found == [
        ["rank 0 · pid 811 · alive · 0.0 s", "good", "idle or on time"],
        ["rank 1 · pid 812 · stopped · 2.5 s", "bad", "step runs for 2.5 s, in all_reduce"],
    ]


def test_a_request_that_is_stopped_is_aborted(browser: Chromium, server: ServerProcess) -> None:
    num_before = aborted_requests(server)
    browser.evaluate(
        "document.querySelector('#endpoint').value = 'completion', document.querySelector('#max_tokens').value = 480"
    )
    browser.type("#prompt", "Once upon a time")
    browser.press("Enter")
    # The page itself presses the key: the answer may be at its end before a program outside has seen its beginning.
    browser.evaluate(
        "new Promise((done) => { const look = () => {"
        " const said = document.querySelectorAll('.turn')[1]?.lastChild.data ?? '';"
        " if (said.length <= 10) { setTimeout(look, 1); return; }"
        " dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); done(true); }; look(); })"
    )
    browser.wait_for("document.querySelector('#usage').textContent.includes('stopped here')")
    browser.wait_for("document.querySelector('#status').textContent === 'idle'")
    deadline = time.monotonic() + 10  # the engine hears of it a little later than the page
    while (num_aborted := aborted_requests(server)) == num_before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_aborted == num_before + 1, "the answer went on to its end"
    browser.wait_for("!document.querySelector('#send').disabled")


def aborted_requests(server: ServerProcess) -> float:
    """Requests that ended because their client went away."""
    lines = httpx.get(server.url + "/metrics", headers=KEY).text.splitlines()
    found = [line for line in lines if "request_success_total" in line and 'finished_reason="abort"' in line]
    return sum(float(line.split()[-1]) for line in found)


def test_what_the_server_refuses_is_said(browser: Chromium) -> None:
    browser.evaluate("document.querySelector('#max_tokens').value = 100000")
    browser.type("#prompt", "Once")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.turn.error')?.textContent.includes('max_tokens')")


def test_an_answer_obeys_the_schema_under_parameters(browser: Chromium) -> None:
    browser.evaluate("document.querySelector('#schema').value = '{', document.querySelector('#max_tokens').value = 40")
    browser.type("#prompt", "Once")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.turn.error')?.textContent.includes('JSON schema')")
    browser.click("#clear")
    browser.evaluate("""document.querySelector('#schema').value = '{"enum": ["a mouse", "a fox"]}'""")
    ask(browser, "Who is it?")
    answer = browser.evaluate("document.querySelectorAll('.turn')[1].lastChild.data")
    assert answer in ('"a mouse"', '"a fox"')


def test_an_answer_that_was_cut_says_so_and_a_full_context_drops_the_oldest_turns(browser: Chromium) -> None:
    browser.evaluate("document.querySelector('#max_tokens').value = 3")
    ask(browser, "Tell me a story.")
    assert browser.text(".cut").startswith("stopped at 3 tokens: max_tokens")
    assert "stopped at 3 tokens" in browser.text("#usage")
    browser.evaluate("document.querySelector('#max_tokens').value = ''")
    ask(browser, "And now a long one.")
    assert browser.evaluate("document.querySelectorAll('.cut').length") == 1, "as much as there is room for"
    context = 512
    ask(browser, "dog " * 200)
    ask(browser, "cat " * 200)
    browser.wait_for("document.querySelectorAll('.turn.note').length > 0")
    assert f"The context of {context} tokens is full" in browser.text(".turn.note")
    assert browser.evaluate("document.querySelectorAll('.turn.error').length") == 0
    browser.click("#clear")
    assert browser.evaluate("document.querySelector('#usage').textContent") == ""


def ask(browser: Chromium, prompt: str) -> None:
    """Send a prompt and wait for the end of its answer."""
    browser.evaluate("document.querySelector('#usage').textContent = ''")
    browser.type("#prompt", prompt)
    browser.press("Enter")
    browser.wait_for("document.querySelector('#usage').textContent !== '' && !document.querySelector('#send').disabled")


WIDTHS = [(390, 844), (768, 1024), (1280, 800), (1440, 900)]


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_it_fits(browser: Chromium, width: int, height: int) -> None:
    browser.set_size(width, height)
    browser.evaluate("document.querySelector('#parameters').open = true")
    assert browser.evaluate("document.documentElement.clientWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") == width, "nothing spills over the side"
    wide = "[...document.querySelectorAll('.card, .tiles, header, .buttons, .params, figure, canvas')]"
    assert browser.evaluate(f"{wide}.length") > 12
    edges = f"{wide}.map((each) => each.getBoundingClientRect()).filter((box) => box.left < 0 || box.right > {width})"
    assert browser.evaluate(f"{edges}.length") == 0
    cut = "[...document.querySelectorAll('.scroll, .tile .value, .tile .name, .tile small, header span, .chart h3')]"
    cut += ".filter((each) => each.scrollWidth > each.clientWidth && getComputedStyle(each).display !== 'inline')"
    assert browser.evaluate(f"{cut}.map((each) => each.textContent.slice(0, 80))") == [], "nothing is cut"
    targets = browser.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, summary, a')]"
        ".filter((each) => each.checkVisibility())"
        ".map((each) => [each.id || each.textContent, each.offsetWidth, each.offsetHeight])"
    )
    assert len(targets) >= 12
    assert [each for each in targets if min(each[1:]) < 32] == [], "a finger finds it"
    browser.evaluate("document.querySelector('#parameters').open = false, scrollTo(0, 0)")
    bottom = browser.evaluate("document.querySelector('#send').getBoundingClientRect().bottom")
    assert bottom <= height, "the playground is in the first screen"
    main = browser.evaluate("document.querySelector('main').firstElementChild.querySelector('h2').textContent")
    assert main == "Playground"


def test_an_operator_sees_percentiles_errors_memory_and_the_hour(browser: Chromium) -> None:
    ask(browser, "Tell me a story.")
    tile = "document.querySelector('#tile-{} .value').innerText".format
    browser.wait_for(f"{tile('ttft')}.includes('p99')")
    browser.wait_for(f"{tile('itl')}.includes('p99')")
    assert browser.evaluate(tile("errors")).split()[1:] == ["failed", "·", "0", "refused"]
    assert browser.evaluate(tile("preemptions")).startswith("0")
    amount, unit = browser.evaluate(tile("memory")).split()
    assert float(amount) * {"MiB": 1, "GiB": 1024}[unit] > 100
    assert " · up " in browser.text("#version")
    browser.wait_for("document.querySelector('#hour-count').textContent.includes('known')")
    charts = browser.evaluate("[...document.querySelectorAll('.chart h3')].map((title) => title.textContent)")
    assert charts[1:3] == ["Time to first token", "Time between tokens"]
    assert "Errors and preemptions" in charts
    legend = browser.text("#legend-ttft_p99")
    assert all(name in legend for name in ("p50", "p90", "p99"))
    drawn = (
        "document.querySelector('.chart canvas').getContext('2d').getImageData(0, 0, 200, 96).data.some((x) => x > 0)"
    )
    assert browser.evaluate(drawn)


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
        if browser.evaluate(
            "document.activeElement.tagName === 'SUMMARY' && !document.querySelector('#parameters').open"
        ):
            browser.press("Enter")
        reached.add(browser.evaluate("document.activeElement.id"))
    assert {"theme", "endpoint", "temperature", "prompt", "send"} <= reached


def test_an_engine_that_dies_is_told_and_its_successor_serves(browser: Chromium, server: ServerProcess) -> None:
    (engine,) = server.engines()
    engine.kill()
    browser.wait_for(
        "['restarting', 'dead'].some((word) => document.querySelector('#status').textContent.includes(word))"
    )
    browser.wait_for("document.querySelector('#status').textContent === 'idle'", timeout=90)
    browser.type("#prompt", "Once upon")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#journey-rows').textContent.includes('finished')")
    assert browser.evaluate("document.querySelectorAll('.turn.error').length") == 0
