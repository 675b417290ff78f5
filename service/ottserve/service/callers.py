"""Who calls: bearer tokens → callers with their limits. Knows no message, and how much a caller has in hand only
`admission.py` does.

The file holds SHA-256 hashes of tokens. A token is 256 random bits, so no salt and no slow hash is needed: there is
nothing to guess. No token is ever logged or told.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from ottserve.service.reloaded import Reloaded
from ottserve.service.settings import Section
from ottserve.workers.api import OttserveError

MAX_PRIORITY = 100
SCHEME = "bearer"

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


@dataclass(eq=False)
class Unauthenticated(OttserveError):
    """No token, or none that is known here. Nothing was looked at."""


class Caller(Section):
    """One who may call, and how much. A limit that is None is the gateway's alone."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[tuple[Sha256, ...], Field(min_length=1, description="Of each token, old and new in a rotation.")]
    max_requests: Annotated[int | None, Field(ge=1, description="Generations in flight.")] = None
    tokens_per_minute: Annotated[int | None, Field(ge=1, description="Of prompts and answers.")] = None
    max_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Highest it may ask for.")] = 0


ANYONE = Caller.model_construct(name="anyone", sha256=(), max_priority=MAX_PRIORITY)
"""Who calls where no tokens are asked for."""

ENTRIES = TypeAdapter(tuple[Caller, ...])


class Callers:
    """Tells callers by their tokens. The file is read anew when it has changed."""

    def __init__(self, tokens_file: str | None) -> None:
        """Raises ValueError for a file that can't be used, OSError for one that can't be read."""
        self._entries: Reloaded[tuple[Caller, ...]] | None = None
        if tokens_file is not None:
            path = Path(tokens_file)
            self._entries = Reloaded([path], lambda: read_callers(path))

    @property
    def are_told_apart(self) -> bool:
        """Whether a call needs a token."""
        return self._entries is not None

    def identify(self, authorization: str | None) -> Caller:
        """Who sent this value of `authorization`, or none. Raises Unauthenticated.

        It takes as long for a wrong token as for a right one.
        """
        if self._entries is None:
            return ANYONE
        given = hashlib.sha256(_token(authorization).encode()).hexdigest()
        found = None
        for caller in self._entries.current():
            for known in caller.sha256:
                if hmac.compare_digest(given, known):
                    found = caller
        if found is None:
            raise Unauthenticated("the bearer token is not known here")
        return found


def read_callers(path: Path) -> tuple[Caller, ...]:
    """The entries of a tokens file. Raises OSError, and ValueError naming what is wrong but no value."""
    try:
        callers = ENTRIES.validate_python(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", -1) + 1
        raise ValueError(f"gateway.tokens_file={path}: line {line} is no YAML") from None
    except UnicodeDecodeError:
        raise ValueError(f"gateway.tokens_file={path}: not UTF-8") from None
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in error.errors(include_input=False))
        raise ValueError(f"gateway.tokens_file={path}: {'; '.join(problems)}") from None
    _refuse_repeated(path, "name", [caller.name for caller in callers])
    _refuse_repeated(path, "sha256", [known for caller in callers for known in caller.sha256])
    return callers


def _refuse_repeated(path: Path, field: str, values: list[str]) -> None:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"gateway.tokens_file={path}: {field} {value} is there twice")


def _token(authorization: str | None) -> str:
    """The token of the header. Raises Unauthenticated."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != SCHEME or not token:
        raise Unauthenticated("a bearer token is needed: `authorization` with the value `Bearer` and the token")
    return token
