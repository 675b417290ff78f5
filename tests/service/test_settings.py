"""Settings that are refused, and that each is described."""

from typing import Any

import pytest
from pydantic import ValidationError

from ottserve.service.settings import GatewaySettings, Section


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prot": 1}, "prot"),
        ({"admission": {"max_request": 1}}, "max_request"),
        ({"port": 65536}, "port"),
        ({"drain": {"grace_s": float("inf")}}, "grace_s"),
        ({"port": 9000, "metrics": {"port": 9000}}, "port=9000, metrics.port=9000"),
        ({"tls": {"certificate": "a.crt"}}, "certificate=a.crt, key=None"),
        ({"tls": {"client_ca": "a.crt"}}, "client_ca=a.crt"),
        ({"tls": {"certificate": "a", "key": "b", "health_port": 50051}}, "port=50051, tls.health_port=50051"),
    ],
)
def test_bad_settings_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GatewaySettings.model_validate(given)


def sections(section: type[Section]) -> list[type[Section]]:
    below = [field.annotation for field in section.model_fields.values()]
    return [section, *(kind for kind in below if isinstance(kind, type) and issubclass(kind, Section))]


def test_every_setting_is_described() -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in sections(GatewaySettings)
        for name, field in section.model_fields.items()
        if not field.description and not isinstance(field.default, Section)
    ]
    assert bare == []


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings().port = 1  # type: ignore[misc, call-arg]
