"""The gateway's certificates on the HTTP port, read anew at the first handshake after they have changed.

Knows no call. Connections that are open keep what they began with.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from ottserve.service.reloaded import Reloaded
from ottserve.service.settings import TlsSettings


def server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """What a port listens with, or None where the settings name no certificate.

    Raises:
        ValueError: the files do not hold what they should, or the key is not the certificate's.
        OSError: a file can't be read.
    """
    if settings.certificate is None or settings.key is None:
        return None
    certificate, key, client_ca = settings.certificate, settings.key, settings.client_ca
    paths = [Path(path) for path in (certificate, key, client_ca) if path is not None]
    contexts = Reloaded(paths, lambda: _context(certificate, key, client_ca))

    def use_current(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    context = _context(certificate, key, client_ca)
    context.sni_callback = use_current  # called at every handshake, also without a name
    return context


def _context(certificate: str, key: str, client_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, password="")
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
