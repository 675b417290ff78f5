"""Certificates of the gRPC port, read anew at the first handshake after they have changed. Knows no call.

gRPC asks for them at every handshake, on a thread of its own. Connections that are open keep what they began with.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from ottserve.service.reloaded import Reloaded
from ottserve.service.settings import TlsSettings


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials | None:
    """Credentials for the port, or None where the settings name no certificate.

    Raises:
        ValueError: the files do not hold what they should, or the key is not the certificate's.
        OSError: a file can't be read.
    """
    if settings.certificate is None or settings.key is None:
        return None
    certificate, key, client_ca = Path(settings.certificate), Path(settings.key), settings.client_ca
    ca = Path(client_ca) if client_ca else None
    files = Reloaded([certificate, key, *([ca] if ca else [])], lambda: _configuration(certificate, key, ca))
    return grpc.dynamic_ssl_server_credentials(
        files.current(), files.current, require_client_authentication=ca is not None
    )


def _configuration(certificate: Path, key: Path, ca: Path | None) -> grpc.ServerCertificateConfiguration:
    pair, root = (key.read_bytes(), certificate.read_bytes()), ca.read_bytes() if ca else None
    loaded_context(certificate, key, ca)  # gRPC takes anything and fails at the handshakes, so it is tried before
    return grpc.ssl_server_certificate_configuration([pair], root)


def loaded_context(certificate: Path, key: Path, ca: Path | None) -> ssl.SSLContext:
    """A server's context that holds what the files say.

    Raises:
        ValueError: the files do not hold what they should; names the setting.
        OSError: a file can't be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        named = f"gateway.tls.certificate={certificate}, gateway.tls.key={key}"
        raise ValueError(f"{named}: no PEM certificate with its unencrypted key ({error})") from None
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ValueError(f"gateway.tls.client_ca={ca}: no PEM certificates ({error})") from None
    return context
