"""Bytes that no well-behaved client sends: each gets one well-formed answer of 4xx, and the server is well afterwards.

What only looks odd and means something is served. After an error of the protocol itself the connection is closed.
"""

import gzip
import json

import h11
import pytest
from raw_http import ask, connect, post, read_answers

COMPLETIONS = "/v1/completions"
GOOD = b'{"prompt":"a","max_tokens":1,"temperature":0}'
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
GZIPPED = gzip.compress(GOOD)


def head(line, *headers):
    return b"\r\n".join([line, b"Host: localhost", *headers, b"", b""])


def posted(headers, body=b""):
    """A POST to completions with headers as they are."""
    return b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + headers + b"\r\n" + body


def get(target):
    return head(b"GET " + target + b" HTTP/1.1")


BODIES = {
    "truncated": (b'{"prompt":"a"', 400, "not valid JSON"),
    "utf-16": (GOOD.decode().encode("utf-16"), 400, "not valid JSON"),
    "latin-1": ('{"prompt":"\u00e9"}'.encode("latin-1"), 400, "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, 200, ""),
    "raw NUL": (b'{"prompt":"a\x00b"}', 400, "not valid JSON"),
    "lone surrogate": (b'{"prompt":"\\ud800 a"}', 400, "not valid JSON"),
    "lone surrogate in a name": (b'{"prompt":"a","\\udfff":1}', 400, "not valid JSON"),
    "NaN": (b'{"prompt":"a","temperature":NaN}', 400, ""),
    "Infinity": (b'{"prompt":"a","top_p":-Infinity}', 400, ""),
    "a float beyond all": (b'{"prompt":"a","max_tokens":1e400}', 400, "max_tokens"),
    "an integer of 400 digits": (b'{"prompt":"a","max_tokens":1' + b"0" * 400 + b"}", 400, "max_tokens"),
    "an integer of 5000 digits": (b'{"prompt":"a","seed":1' + b"0" * 5000 + b"}", 400, "not valid JSON"),
    "nested 100,000 deep": (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "not valid JSON"),
    "nested in an unknown field": (b'{"prompt":"a","x":' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 400, "not valid JSON"),
    "100,000 names": (b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}", 400, "more than 65536 values"),
    "the same name twice: the last one counts": (b'{"prompt":"","prompt":"a","max_tokens":1}', 200, ""),
    "an escaped NUL": (b'{"prompt":"a\\u0000b","max_tokens":1}', 200, ""),
}


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(url, name, path):
    body, status, says = BODIES[name]
    [answer] = ask(url, post(path, body))
    if path == COMPLETIONS:
        assert answer.status == status, answer.body
        assert says in answer.body.decode()
    elif status == 200 or not says.startswith("not valid JSON"):
        assert answer.status in (200, 400)  # other endpoints have other fields
    else:
        assert answer.status == 400
    assert_form(answer)


def assert_form(answer):
    assert answer.headers["content-type"] == "application/json"
    if answer.status != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == answer.status
        assert 0 < len(error["message"]) < 1100


REQUESTS = {
    # name: (bytes, status; None: 400, and the connection is closed because the protocol itself is broken)
    "gzip": (post(COMPLETIONS, GZIPPED, "Content-Encoding: gzip"), 415),
    "a gzip bomb": (post(COMPLETIONS, gzip.compress(b" " * 20_000_000), "Content-Encoding: gzip"), 415),
    "two codings": (post(COMPLETIONS, GZIPPED, "Content-Encoding: identity, br"), 415),
    "no coding, by name": (post(COMPLETIONS, GOOD, "Content-Encoding: identity"), 200),
    "chunks with extensions and a trailer": (
        posted(
            b"Transfer-Encoding: chunked\r\n",
            b"5\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nX-A: b\r\n\r\n" % (GOOD[:5], len(GOOD) - 5, GOOD[5:]),
        ),
        200,
    ),
    "no body": (posted(b""), 400),
    "a chunk of no size": (posted(b"Transfer-Encoding: chunked\r\n", b"zz\r\n" + GOOD), None),
    "a chunk of negative size": (posted(b"Transfer-Encoding: chunked\r\n", b"-5\r\n" + GOOD), None),
    "a chunk of 2^72 bytes": (posted(b"Transfer-Encoding: chunked\r\n", b"f" * 18 + b"\r\n" + GOOD), None),
    "chunks and a length": (posted(b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n"), None),
    "gzip as a transfer coding": (posted(b"Transfer-Encoding: gzip\r\n", GZIPPED), None),
    "two lengths": (posted(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"aaaaaa"), None),
    "a negative length": (posted(b"Content-Length: -5\r\n", b"aaaaa"), None),
    "a length in words": (posted(b"Content-Length: five\r\n", b"aaaaa"), None),
    "a length beyond 64 bits": (posted(b"Content-Length: 99999999999999999999\r\n", b"aaaaa"), None),
    "a length of 5000 digits": (posted(b"Content-Length: " + b"9" * 5000 + b"\r\n"), None),
    "a length over the limit": (posted(b"Content-Length: 9999999999\r\n", b"aaaaa"), 413),
    "an unknown expectation": (post(COMPLETIONS, GOOD, "Expect: nonsense"), 200),
    "HTTP/1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
    "HTTP/1.0 with a body": (post(COMPLETIONS, GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    "HTTP/2 all at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
    "HTTP/3.7": (head(b"GET /health HTTP/3.7"), None),
    "a TLS greeting": (bytes.fromhex("16030100a5010000a10303") + bytes(160), None),
    "noise": (bytes(range(256)) * 8, None),
    "bare line feeds": (b"GET /health HTTP/1.1\nHost: localhost\n\n", None),
    "a header without a colon": (head(b"GET /v1/models HTTP/1.1", b"nothing"), None),
    "a header with a space before its colon": (head(b"GET /v1/models HTTP/1.1", b"X : b"), None),
    "a header without a name": (head(b"GET /v1/models HTTP/1.1", b": b"), None),
    "a NUL in a header": (head(b"GET /v1/models HTTP/1.1", b"X: a\x00b"), None),
    "a folded header": (head(b"GET /v1/models HTTP/1.1", b"X: a\r\n b"), None),
    "a header's name beyond ASCII": (head(b"GET /v1/models HTTP/1.1", b"X\xc3\xa9: b"), None),
    "headers beyond ASCII": (head(b"GET /v1/models HTTP/1.1", b"X-Request-Id: \xff\xfe", b"Authorization: \xff"), 200),
    "a request id of 5000 characters": (post(COMPLETIONS, GOOD, "X-Request-Id: " + "a" * 5000), 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "a host that is not one": (b"GET /v1/models HTTP/1.1\r\nHost: \xff[::\r\n\r\n", 403),
    "another host's address": (get(b"http://other/v1/models"), 403),
    "a doubled slash": (get(b"//v1//models"), 404),
    "dots": (get(b"/v1/models/../../etc/passwd"), 404),
    "a broken escape": (get(b"/v1/models/%zz%00%ff"), 404),
    "a path beyond ASCII": (get(b"/v1/models/\xc3\xa9"), None),
    "a path of 70,000 bytes": (get(b"/" + b"a" * 70_000), 431),
    "a path without a slash": (get(b"v1/models"), None),
    "an odd query": (get(b"/v1/models?%ff=%00&a[]=&&=;"), 200),
    "the whole server": (head(b"OPTIONS * HTTP/1.1"), 404),
    "a tunnel": (head(b"CONNECT a:1 HTTP/1.1"), None),
    "a method in small letters": (head(b"post /v1/completions HTTP/1.1"), None),
    "an unknown method": (head(b"FOO /v1/completions HTTP/1.1"), None),
    "a WebSocket": (
        head(
            b"GET /v1/completions HTTP/1.1",
            b"Connection: Upgrade",
            b"Upgrade: websocket",
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            b"Sec-WebSocket-Version: 13",
        ),
        405,
    ),
    "a form": (post(COMPLETIONS, b"prompt=a", content_type="application/x-www-form-urlencoded"), 400),
    "a content type that is nearly right": (post(COMPLETIONS, GOOD, content_type="application/json/../x"), 400),
    **{
        f"{method} where POST belongs": (head(f"{method} {COMPLETIONS} HTTP/1.1".encode()), 405)
        for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND")
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(url, name):
    sent, status = REQUESTS[name]
    [answer] = ask(url, sent)
    assert answer.status == (status or 400), answer.body
    if status in (None, 431):
        assert answer.headers["connection"] == "close"
    assert_form(answer)


def test_a_head_request_has_no_body(url):
    [answer] = ask(url, head(b"HEAD /v1/completions HTTP/1.1"), method="HEAD")
    assert (answer.status, answer.body) == (405, b"")


def test_requests_in_one_packet_are_answered_in_order(url):
    lengths = [1, 2, 3, 2, 1]
    bodies = [json.dumps({"prompt": "Once", "max_tokens": n, "ignore_eos": True}).encode() for n in lengths]
    answers = ask(url, b"".join(post(COMPLETIONS, body) for body in bodies), most=len(bodies))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == lengths


def test_a_bad_body_does_not_spoil_the_next_request_of_its_connection(url):
    bad, good = ask(url, post(COMPLETIONS, b"{") + post(COMPLETIONS, GOOD), most=2)
    assert (bad.status, good.status) == (400, 200)


def test_noise_behind_a_request_closes_the_connection(url):
    """Whether its answer still comes is a matter of time; half an answer, or one inside another, never does."""
    answers = ask(url, post(COMPLETIONS, GOOD) + b"noise\r\n\r\n", most=3)
    assert [answer.status for answer in answers] in ([], [200], [400], [200, 400])


def test_a_body_byte_by_byte_is_served(url):
    request = post(COMPLETIONS, GOOD)
    [answer] = ask(url, (request[i : i + 1] for i in range(len(request))))
    assert answer.status == 200


def test_a_client_that_waits_to_be_asked_for_its_body(url):
    whole = post(COMPLETIONS, GOOD, "Expect: 100-continue")
    with connect(url) as connection:
        connection.sendall(whole[: -len(GOOD)])
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(GOOD)
        [answer] = read_answers(connection, 1)
    assert answer.status == 200


def test_clients_that_stop_in_the_middle_delay_no_other_client(url):
    """Half a head, a head without its body, half a body, half a chunk, and silence."""
    request = post(COMPLETIONS, GOOD)
    halves = [b"", request[:30], request[: -len(GOOD)], request[:-5]]
    halves.append(posted(b"Transfer-Encoding: chunked\r\n", b"ff\r\n{"))
    waiting = [connect(url) for _ in range(8) for _ in halves]
    try:
        for i, connection in enumerate(waiting):
            connection.sendall(halves[i % len(halves)])
        for _ in range(3):
            [answer] = ask(url, request)
            assert answer.status == 200
        # Those that finish after all are served, in any order.
        for connection in reversed(waiting[2::5]):
            connection.sendall(GOOD)
            [answer] = read_answers(connection, 1)
            assert answer.status == 200
    finally:
        for connection in waiting:
            connection.close()


def test_a_client_that_sends_no_more_and_then_reads(url):
    """It has closed its half of the connection: without a whole request there is nothing to answer."""
    for sent in (b"", post(COMPLETIONS, GOOD)[:-5]):
        with connect(url) as connection:
            connection.sendall(sent)
            connection.shutdown(1)
            try:
                answers = read_answers(connection, 1)
            except h11.RemoteProtocolError:
                answers = []
            assert all(answer.status == 400 for answer in answers)


def test_the_server_is_well_after_all_of_it(url):
    [answer] = ask(url, post(COMPLETIONS, GOOD))
    assert answer.status == 200
    assert answer.json()["usage"]["total_tokens"] == 2
