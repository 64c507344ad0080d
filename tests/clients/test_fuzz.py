"""Requests made from OpenAPI documents: `scripts/fuzz_api.py` with few cases, always the same."""

import re

import httpx
import pytest

CASES = 400

pytestmark = pytest.mark.timeout(300)  # a program may be slow to start where others run


def references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_of_our_document_leads_somewhere(url):
    document = httpx.get(f"{url}/openapi.json").json()
    found = set(references(document))
    assert {"#/components/schemas/CompletionRequest", "#/components/schemas/ChatCompletionChunk"} <= found
    for reference in found:
        _, _, kind, name = reference.split("/")
        assert name in document["components"][kind], reference
    assert set(document["components"]["schemas"]) == {reference.split("/")[-1] for reference in found}


@pytest.mark.slow
@pytest.mark.parametrize("document", ["own", "openai"])
def test_nothing_made_from_a_document_breaks_the_server(run_program, repository, request, document):
    arguments = ["--cases", str(CASES)]
    if document == "openai":
        shared = request.getfixturevalue("shared_dir")
        arguments += ["--document", str(shared / "data" / "openai-openapi" / "openapi.yaml")]
    url = request.getfixturevalue("url")
    done = run_program("schemas", repository / "scripts" / "fuzz_api.py", "--url", url, *arguments, ok=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = int(re.search(r"^(\d+) requests in .* 0 findings$", done.stdout, re.MULTILINE)[1])
    assert sent > CASES * 0.7
    # Some of them must have got through to the model, and some must have been refused.
    for path in ("/completions", "/chat/completions"):
        counts = re.findall(rf"(?m)^ *(\d+) × (\d+)  POST (?:/v1)?{path}$", done.stdout)
        by_status = {status: int(count) for count, status in counts}
        assert by_status["200"] >= 3
        assert by_status["400"] >= 3
