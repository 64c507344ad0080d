"""Certificates for tests, made by the `openssl` command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, in PEM form."""

    certfile: Path
    keyfile: Path


def make_certificate(directory: Path, name: str, *, password: str = "") -> Certificate:
    """A certificate of ``localhost`` and 127.0.0.1; skips the test where there is no `openssl`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    made = Certificate(directory / f"{name}-cert.pem", directory / f"{name}-key.pem")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", str(made.keyfile)]
    key += ["-passout", f"pass:{password}"] if password else ["-nodes"]
    about = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run([openssl, "req", "-x509", *key, "-out", str(made.certfile), *about], check=True, capture_output=True)
    return made
