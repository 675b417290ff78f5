"""The gateway's certificates on the HTTP port, read anew at the first handshake after they have changed.

Knows no call. Connections that are open keep what they began with.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from ottserve.service.reloaded import Reloaded
from ottserve.service.settings import TlsSettings
from ottserve.service.tls import loaded_context


def server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """What a port listens with, or None where the settings name no certificate.

    Raises:
        ValueError: the files do not hold what they should, or the key is not the certificate's.
        OSError: a file can't be read.
    """
    if settings.certificate is None or settings.key is None:
        return None
    certificate, key = Path(settings.certificate), Path(settings.key)
    ca = Path(settings.client_ca) if settings.client_ca else None
    contexts = Reloaded([certificate, key, *([ca] if ca else [])], lambda: _context(certificate, key, ca))

    def use_current(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    context = _context(certificate, key, ca)
    context.sni_callback = use_current  # called at every handshake, also without a name
    return context


def _context(certificate: Path, key: Path, ca: Path | None) -> ssl.SSLContext:
    context = loaded_context(certificate, key, ca)
    context.set_alpn_protocols(["http/1.1"])
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
