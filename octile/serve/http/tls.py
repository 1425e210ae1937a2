"""TLS of the server: its certificate and key."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple


class TlsFiles(NamedTuple):
    """Two files in PEM.

    Attributes:
        certfile: the certificate, then those that lead to one that clients know.
        keyfile: its private key, without a password.
    """

    certfile: Path
    keyfile: Path

    def context(self) -> ssl.SSLContext:
        """The context for a server of HTTP/1.1, with TLS 1.2 or 1.3.

        Raises:
            ValueError: a file cannot be read, is no certificate or no key without a password, or the key belongs to
                another certificate.
        """
        for name, path in zip(("ssl_certfile", "ssl_keyfile"), self, strict=True):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ValueError(f"{name} {str(path)!r} cannot be read: {error.strerror}") from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.certfile)
        except ssl.SSLError:
            raise ValueError(f"ssl_certfile {str(self.certfile)!r} is no certificate in PEM") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certfile, self.keyfile, self._refuse_password)
        except ssl.SSLError as error:
            key, certificate = repr(str(self.keyfile)), repr(str(self.certfile))
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"ssl_keyfile {key} does not belong to ssl_certfile {certificate}") from None
            why = f"it is no private key in PEM, or its certificate {certificate} is too weak"
            reason = f" ({error.reason})" if error.reason else ""  # OpenSSL 3 names none for a file without a key
            raise ValueError(f"ssl_keyfile {key} cannot be used: {why}{reason}") from None
        return context

    def _refuse_password(self) -> str:
        """Raise instead of asking for a password at the terminal."""
        raise ValueError(f"ssl_keyfile {str(self.keyfile)!r} is encrypted: a key without a password is needed")
