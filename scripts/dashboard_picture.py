"""Makes the pictures of the live page: wide and of a phone, dark and light, over the embedded model with traffic.

    python scripts/dashboard_picture.py [FOLDER]

They go to ``docs/images``: ``dashboard.png``, ``dashboard-light.png``, ``dashboard-phone.png``,
``dashboard-phone-light.png``.

Needs a Chromium (``apt-get install chromium``).
"""

import concurrent.futures
import json
import random
import sys
import threading
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "server"))

from chromium import Chromium, find_chromium  # noqa: E402 -- the tests' browser
from server_process import REAL, ServerProcess  # noqa: E402

SIZES = {"dashboard": (1280, 1710), "dashboard-phone": (390, 1690)}
TRAFFIC_SECONDS = 100
"""Until the hour's charts have a few points."""
FLAGS = ["--port=0", "--num-gpu-blocks-override=2000", "--max-num-seqs=12", "--max-num-batched-tokens=256"]
OPENINGS = [
    "You are a helpful assistant who tells short stories to children. Each has a beginning, a middle and an end. ",
    "Answer in plain words, as one would to a curious friend who has never heard of the matter before. ",
]
QUESTIONS = ["Tell me about a fox.", "Why is the sea salt?", "Who lives in the forest?", "What does the wind say?"]


def ask(url: str, number: int) -> None:
    """One request of the traffic."""
    chosen = random.Random(number)
    body = {
        "messages": [
            {"role": "system", "content": chosen.choice(OPENINGS) * chosen.randint(1, 4)},
            {"role": "user", "content": chosen.choice(QUESTIONS)},
        ],
        "max_tokens": chosen.randint(40, 260),
        "ignore_eos": True,
        "n": chosen.choice([1, 1, 1, 2]),
        "temperature": 0.8,
        "seed": number,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=120).read()


def main() -> None:
    """Make the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "images"
    program = find_chromium()
    if program is None:
        sys.exit("there is no Chromium here; install one, or name it in CHROMIUM")
    folder.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    with (
        ServerProcess([*REAL, *FLAGS]) as server,
        Chromium(program) as browser,
        concurrent.futures.ThreadPoolExecutor(20) as pool,
    ):
        url = server.wait_until_ready()
        browser.open(url + "/dashboard")

        def keep_busy(worker: int) -> None:
            number = worker
            while not stop.is_set():
                ask(url, number)
                number += 100

        for worker in range(16):
            pool.submit(keep_busy, worker)
        try:
            stop.wait(TRAFFIC_SECONDS)
            browser.type("#prompt", "Tell me a story about a fox.")
            browser.press("Enter")
            browser.wait_for("document.querySelectorAll('#journey-rows tr').length > 24")
            browser.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
            for name, (width, height) in SIZES.items():
                browser.set_size(width, height)
                for scheme, ending in (("dark", ""), ("light", "-light")):
                    browser.set_scheme(scheme)
                    stop.wait(1.5)  # the charts are drawn again when the next state comes
                    output = folder / f"{name}{ending}.png"
                    browser.screenshot(output)
                    print(f"{output}: {output.stat().st_size:,} bytes")
        finally:
            stop.set()


if __name__ == "__main__":
    main()
