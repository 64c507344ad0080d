"""What is found without knowing a path: the first page, the documents, the models that are served."""

import re

import pytest
from asgi_client import assert_error, serving
from fake_engine import FakeEngine

from rustvllm.server.launch import console
from rustvllm.server.launch.listen import Listener
from rustvllm.server.state import ServerSettings

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("dashboard", "docs", "location"),
    [("local", True, "dashboard"), ("any", False, "dashboard"), ("off", True, "docs"), ("remote", True, "docs")],
)
async def test_a_browser_is_led_to_the_page_or_the_documents(dashboard, docs, location):
    async with serving(settings=ServerSettings(dashboard=dashboard, enable_docs=docs, api_keys=("k",))) as (client, _):
        answer = await client.get("/", headers=BROWSER)
    assert answer.status_code == 307
    assert answer.headers["location"] == location


async def test_a_program_is_told_the_paths_and_each_of_them_answers():
    async with serving() as (client, _):
        told = (await client.get("/")).json()
        paths = {name: path for name, path in told.items() if name not in ("server", "version", "api")}
        statuses = {name: (await client.get(f"http://localhost/{path}")).status_code for name, path in paths.items()}
    assert statuses == dict.fromkeys(["models", "health", "metrics", "docs", "page"], 200)
    async with serving(settings=ServerSettings(dashboard="off", enable_docs=False)) as (client, _):
        told = (await client.get("/", headers=BROWSER)).json()
    assert set(told) == {"server", "version", "api", "models", "health", "metrics"}


async def test_the_documents_need_nothing_from_elsewhere_and_name_every_endpoint_and_field():
    async with serving() as (client, _):
        answer = await client.get("/docs")
        document = (await client.get("/openapi.json")).json()
    page = answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert re.findall(r"(?:src|href)=\"(?!#|openapi.json)", page) == []
    assert "<script" not in page
    for path, methods in document["paths"].items():
        assert all(f"{method.upper()} {path}" in page for method in methods), path
    fields = [field for schema in document["components"]["schemas"].values() for field in schema.get("properties", ())]
    assert len(fields) > 100
    assert all(f"<code>{field}</code>" in page for field in fields)
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert links <= set(re.findall(r'id="([^"]+)"', page))


async def test_an_unknown_model_is_told_which_are_served():
    engine = FakeEngine()
    async with serving(engine) as (client, _):
        body = {"model": "gpt-9", "prompt": "x"}
        told = "The model `gpt-9` does not exist. Served here: `fake`, `alias/fake`."
        assert_error(await client.post("/v1/completions", json=body), 404, "NotFoundError", param="model", says=(told,))
        assert_error(await client.get("/v1/models/gpt-9"), 404, "NotFoundError", param="model", says=(told,))
        long = await client.post("/v1/completions", json={"model": "x" * 100_000, "prompt": "x"})
        assert_error(long, 404, "NotFoundError", param="model")
        assert len(long.content) < 1000


@pytest.mark.parametrize(
    ("flags", "says", "says_not"),
    [
        (
            "page",
            ("rustvllm chat --url http://127.0.0.1:9\n", "http://127.0.0.1:9/dashboard", "/v1/completions"),
            "KEY",
        ),
        ("key", ("rustvllm chat --url http://127.0.0.1:9 --api-key YOUR_KEY", "Bearer YOUR_KEY"), "dashboard"),
        ("embed", ("/v1/embeddings", '{"model": "m", "input": "Once upon a time"}'), "chat"),
        ("classify", ("/classify", '{"model": "m", "input": "Once upon a time"}'), "chat"),
    ],
)
def test_the_ready_message_says_how_to_go_on(capsys, flags, says, says_not):
    console.say_ready(
        Listener(None, "http://127.0.0.1:9"),
        "m",
        task=flags if flags in ("embed", "classify") else "generate",
        needs_key=flags == "key",
        has_page=flags == "page",
    )
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("serving m on http://127.0.0.1:9", "curl http://127.0.0.1:9/", *says))
    assert says_not not in shown
