"""Whether the files that settings name can be read, before anything is started. Looks at no content."""

from __future__ import annotations

from pathlib import Path

from ottserve.service.settings import GatewaySettings


class FileUnreadable(Exception):
    """A file that is missing or not to be read; the message names the setting."""


def check_files(gateway: GatewaySettings) -> None:
    """Raises `FileUnreadable` for the first file of the settings that can't be read."""
    for name, file in (
        ("gateway.tls.certificate", gateway.tls.certificate),
        ("gateway.tls.key", gateway.tls.key),
        ("gateway.tls.client_ca", gateway.tls.client_ca),
        ("gateway.tokens_file", gateway.tokens_file),
    ):
        try:
            if file is not None:
                Path(file).open("rb").close()
        except OSError as error:
            raise FileUnreadable(f"{name}={file}: {error.strerror}") from None
