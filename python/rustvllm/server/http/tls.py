"""The certificate that a server shows: checked before anything is loaded, read again when its files change."""

import asyncio
import os
import ssl
from pathlib import Path
from typing import NoReturn

from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger
from rustvllm.server.flags.http_settings import TlsSettings

logger = init_logger(__name__)

REFRESH_SECONDS = 10.0
"""How often changed files are looked for."""


def create_ssl_context(settings: TlsSettings) -> ssl.SSLContext:
    """TLS 1.2 and newer with these files.

    Raises:
        ConfigError: A file cannot be read or does not fit; names the flag.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, settings)
    if settings.ca_certs is not None:
        _check_readable("--ssl-ca-certs", settings.ca_certs)
        try:
            context.load_verify_locations(settings.ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {settings.ca_certs} has no certificates in PEM format: {error}"
            ) from error
    context.verify_mode = ssl.VerifyMode(settings.cert_reqs)
    if settings.ciphers is not None:
        try:
            context.set_ciphers(settings.ciphers)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-ciphers {settings.ciphers!r} names no cipher that the installed OpenSSL supports"
            ) from error
    return context


async def keep_fresh(context: ssl.SSLContext, settings: TlsSettings) -> None:
    """Read certificate and key again whenever their files have changed; connections that are open keep theirs."""
    seen = _stamp(settings)
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        stamp = _stamp(settings)
        if stamp == seen:
            continue
        try:
            # Not into the one in use before it is known to fit: half a pair would fail every handshake.
            _load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)
            _load_certificate(context, settings)
        except ConfigError as error:  # perhaps one file is new and the other not yet
            logger.warning("cannot reload the certificate, so the old one stays in use: %s", error)
        else:
            seen = stamp
            logger.info("reloaded the certificate %s", settings.certfile)


def _stamp(settings: TlsSettings) -> tuple[tuple[int, int] | None, ...]:
    stamps: list[tuple[int, int] | None] = []
    for name in (settings.certfile, settings.keyfile or settings.certfile):
        try:
            status = os.stat(name)  # noqa: PTH116 -- follows links, as the reading does
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_ino))
    return tuple(stamps)


def _load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    key = settings.keyfile or settings.certfile
    _check_readable("--ssl-certfile", settings.certfile)
    _check_readable("--ssl-keyfile", key)

    def no_password() -> NoReturn:
        raise ConfigError(f"the private key in {key} is encrypted; use an unencrypted key that only this user can read")

    try:
        context.load_cert_chain(settings.certfile, settings.keyfile, password=no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the private key in {key} is not that of the certificate in {settings.certfile}"
        elif settings.keyfile is None:
            why = (
                f"--ssl-certfile {settings.certfile} must hold a certificate and its private key in PEM form; a key in "
                "a file of its own is given with --ssl-keyfile"
            )
        else:
            why = (
                f"--ssl-certfile {settings.certfile} and --ssl-keyfile {key} must hold a certificate and its private "
                "key in PEM form"
            )
        raise ConfigError(f"{why} ({error.reason or error})") from error


def _check_readable(flag: str, name: str) -> None:
    try:
        with Path(name).open("rb"):
            return
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {name}: {error.strerror or error}") from error
