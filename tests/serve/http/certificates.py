"""Certificates for 127.0.0.1 that openssl makes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from octile.serve.http.tls import TlsFiles


def make_certificate(folder: Path, name: str, *options: str) -> TlsFiles:
    """Make a certificate that signs itself, and its key, which has no password unless options say otherwise."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl in PATH to make a certificate")
    files = TlsFiles(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    password = options or ["-nodes"]
    command += [*names, *password, "-keyout", str(files.keyfile), "-out", str(files.certfile)]
    subprocess.run(command, check=True, capture_output=True)
    return files
