"""TLS contexts: what the files must be, who may connect, and that renewed files are read again."""

import asyncio
import contextlib
import ssl

import pytest
from certificates import make_certificate

from rustvllm.exceptions import ConfigError
from rustvllm.server.flags.http_settings import TlsSettings
from rustvllm.server.http import tls
from rustvllm.server.http.tls import create_ssl_context, keep_fresh


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(directory, name) for name in ("server", "other")} | {
        "locked": make_certificate(directory, "locked", password="sesame")
    }


def settings_of(certificate, **options) -> TlsSettings:
    return TlsSettings(str(certificate.certfile), str(certificate.keyfile), **options)


def client_of(certificate, own=None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate.certfile)
    if own is not None:
        context.load_cert_chain(own.certfile, own.keyfile)
    return context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, str]:
    """The subject of the server's certificate, and the version of TLS."""
    pipes = [ssl.MemoryBIO() for _ in range(2)]
    ends = [
        client.wrap_bio(pipes[0], pipes[1], server_hostname="localhost"),
        server.wrap_bio(pipes[1], pipes[0], server_side=True),
    ]
    waiting = [True, True]
    for _ in range(10):
        for index, end in enumerate(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                if waiting[index]:
                    end.do_handshake()
                    waiting[index] = False
    assert not any(waiting)
    with contextlib.suppress(ssl.SSLWantReadError):
        ends[0].read(1)  # with TLS 1.3 a server refuses a client's certificate afterwards
    subject = dict(pair for part in ends[0].getpeercert()["subject"] for pair in part)
    return subject["commonName"], ends[0].version()


def test_a_certificate_and_its_key(made):
    assert shake_hands(create_ssl_context(settings_of(made["server"])), client_of(made["server"])) == (
        "server",
        "TLSv1.3",
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(create_ssl_context(settings_of(made["server"])), client_of(made["other"]))


def test_both_in_one_file(made, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(made["server"].certfile.read_bytes() + made["server"].keyfile.read_bytes())
    assert shake_hands(create_ssl_context(TlsSettings(str(both))), client_of(made["server"]))[0] == "server"


def test_nothing_older_than_tls_1_2(made):
    client = client_of(made["server"])
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake_hands(create_ssl_context(settings_of(made["server"])), client)[1] == "TLSv1.2"
    assert create_ssl_context(settings_of(made["server"])).minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("cert_reqs", "needs_one"), [(1, False), (2, True)])
def test_certificates_of_clients(made, cert_reqs, needs_one):
    server = create_ssl_context(settings_of(made["server"], ca_certs=str(made["other"].certfile), cert_reqs=cert_reqs))
    assert shake_hands(server, client_of(made["server"], made["other"]))[0] == "server"
    with pytest.raises(ssl.SSLError) if needs_one else contextlib.nullcontext():
        shake_hands(server, client_of(made["server"]))
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client_of(made["server"], made["server"]))


def test_files_that_do_not_fit_are_named(made, tmp_path):
    text = tmp_path / "text.pem"
    text.write_text("no certificate", encoding="utf-8")
    server, other, locked = (made[name] for name in ("server", "other", "locked"))
    cases = [
        (TlsSettings("/nowhere/c.pem"), "cannot read --ssl-certfile /nowhere/c.pem: No such file"),
        (TlsSettings(str(server.certfile), "/nowhere/k"), "cannot read --ssl-keyfile /nowhere/k: No such file"),
        (TlsSettings(str(server.certfile)), "a key in a file of its own is given with --ssl-keyfile"),
        (TlsSettings(str(server.certfile), str(other.keyfile)), "is not that of the certificate in"),
        (TlsSettings(str(text), str(server.keyfile)), "must hold a certificate and its private key in PEM form"),
        (TlsSettings(str(server.certfile), str(text)), "must hold a certificate and its private key in PEM form"),
        (settings_of(locked), "is encrypted; use an unencrypted key"),
        (settings_of(server, ca_certs="/nowhere/ca", cert_reqs=1), "cannot read --ssl-ca-certs /nowhere/ca"),
        (settings_of(server, ca_certs=str(text), cert_reqs=1), "has no certificates in PEM format"),
        (settings_of(server, ciphers="NONE-SUCH"), "--ssl-ciphers 'NONE-SUCH' names no cipher"),
        (TlsSettings(str(tmp_path)), f"cannot read --ssl-certfile {tmp_path}: Is a directory"),
    ]
    for settings, says in cases:
        with pytest.raises(ConfigError) as caught:
            create_ssl_context(settings)
        assert says in str(caught.value)


async def test_a_renewed_certificate_is_shown_to_new_connections(made, tmp_path, monkeypatch):
    monkeypatch.setattr(tls, "REFRESH_SECONDS", 0.01)
    certfile, keyfile = tmp_path / "c.pem", tmp_path / "k.pem"

    def put(name: str) -> None:
        for source, target in ((made[name].certfile, certfile), (made[name].keyfile, keyfile)):
            new = target.with_suffix(".new")
            new.write_bytes(source.read_bytes())
            new.rename(target)

    put("server")
    settings = TlsSettings(str(certfile), str(keyfile))
    context = create_ssl_context(settings)
    task = asyncio.create_task(keep_fresh(context, settings))
    await asyncio.sleep(0)
    # Half a pair is not taken, and does no harm.
    keyfile.write_bytes(made["other"].keyfile.read_bytes())
    await asyncio.sleep(0.05)
    assert shake_hands(context, client_of(made["server"]))[0] == "server"
    put("other")
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(ssl.SSLCertVerificationError):
                assert shake_hands(context, client_of(made["other"]))[0] == "other"
                break
            await asyncio.sleep(0.01)
    task.cancel()
