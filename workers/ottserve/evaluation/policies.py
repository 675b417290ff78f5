"""Rows of a comparison by name: `ott`, `kivi`, `ott:k_bits=4,fit_rounds=8`. Knows what may be asked, not what it costs.

Whatever `CacheSettings` has can be set, but for the memory, which a comparison allocates by the length of its texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import ValidationError

from ottserve.workers.kv.table import check_cache
from ottserve.workers.settings import CacheSettings, EngineSettings

MEMORY_SETTINGS = ("memory_bytes", "num_pages")


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A named cache."""

    name: str
    cache: CacheSettings


REFERENCE = PolicyRow("fp16", CacheSettings(policy="fp16"))  # type: ignore[call-arg]


def caption(name: str) -> str:
    """A row's name for a picture: a plan without its folders, which would leave no room for what is drawn."""
    return re.sub(r"=[^,]*/", "=", name)


def parse_policy(name: str) -> PolicyRow:
    """A row out of `policy[:setting=value[,setting=value]…]`; several layers are written `plain_layers=0+1`.

    Raises:
        ValueError: names the row, the setting, and what is wrong with it.
    """
    policy, _, overrides = name.partition(":")
    fields: dict[str, object] = {"policy": policy}
    for override in filter(None, overrides.split(",")):
        setting, has_value, value = override.partition("=")
        if not has_value:
            raise ValueError(f"{name}: {override!r} is not of the form setting=value")
        if setting == "policy" or setting in MEMORY_SETTINGS:
            raise ValueError(f"{name}: {setting} can't be set in a row")
        fields[setting] = tuple(filter(None, value.split("+"))) if setting == "plain_layers" else value
    try:
        cache = EngineSettings.model_validate({"cache": fields}).cache
        check_cache(cache)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise ValueError(f"{name}: {'; '.join(problems)}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return PolicyRow(name, cache)


def parse_policies(names: str) -> list[PolicyRow]:
    """Rows out of names with blanks between them.

    Raises:
        ValueError: as `parse_policy`, or there is none, or one is named twice.
    """
    rows = [parse_policy(name) for name in names.split()]
    if not rows:
        raise ValueError("policies: at least one is needed")
    if len({row.name for row in rows}) < len(rows):
        raise ValueError(f"policies: {names!r} names one of them twice")
    return rows
