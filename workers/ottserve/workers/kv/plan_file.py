"""A file that says how each layer is stored, as `ottserve calibrate` writes it. Reads and writes; chooses nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ottserve.workers.core.kvspec import LayerSpec
from ottserve.workers.settings import CodeBits, FineBits, StoredKeys


class Part(BaseModel):
    """A frozen part of the file that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PlannedModel(Part):
    """What the plan was made for: the name says it to people, the fingerprint to the program."""

    name: str
    fingerprint: str


class PlannedLayer(Part):
    """A layer's own; the fields are those of `LayerSpec`."""

    k_bits: CodeBits
    v_bits: CodeBits
    k_fine: Annotated[int, Field(ge=0)] = 0
    k_fine_bits: FineBits = 2
    pool: Annotated[int, Field(ge=0)]

    @property
    def spec(self) -> LayerSpec:
        """The same as the cache takes it."""
        return LayerSpec(
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            k_fine=self.k_fine,
            k_fine_bits=self.k_fine_bits,
            pool=self.pool,
        )


class PlannedText(Part):
    """A text that was measured: tokens `from_token` … `from_token` + `num_tokens` of a file, and their digest."""

    name: str
    digest: str
    from_token: int
    num_tokens: int


class Origin(Part):
    """How the plan was made. For people; nothing is computed from it.

    Attributes:
        version: of the program.
        wanted_bits: the budget.
        bits_per_element: page bits of one stored element under the plan.
        expected_kl: what the measured sensitivities add up to, nats.
    """

    version: str
    texts: tuple[PlannedText, ...]
    wanted_bits: float
    bits_per_element: float
    expected_kl: float


class CachePlan(Part):
    """The whole file.

    Attributes:
        group, fit_rounds, unbiased, rotate_values, keys: as the settings of these names, for every layer.
        layers: by layer.
        origin: None where people wrote the file.
    """

    format: Literal[1] = 1
    model: PlannedModel
    group: int
    fit_rounds: Annotated[int, Field(ge=0, le=32)]
    unbiased: bool
    rotate_values: bool
    keys: StoredKeys = "post_rope"
    layers: tuple[PlannedLayer, ...]
    origin: Origin | None = None


def read_plan(path: str) -> CachePlan:
    """The plan of a file.

    Raises:
        ValueError: it can't be read, is no JSON, or a field is unknown, missing or out of range; names file and field.
    """
    try:
        return CachePlan.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"cache.plan={path}: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"cache.plan={path}: {'; '.join(map(_problem, error.errors()))}") from None
    except ValueError as error:  # of the decoders of UTF-8 and JSON
        raise ValueError(f"cache.plan={path}: not a JSON file ({error})") from None


def write_plan(plan: CachePlan, path: Path) -> None:
    """Write the file, a line a layer.

    Raises:
        OSError: it can't be written.
    """
    fields = plan.model_dump(mode="json")
    layers = ",\n  ".join(json.dumps(layer) for layer in fields.pop("layers"))
    body = json.dumps(fields, indent=1)
    path.write_text(f'{body[:-2]},\n "layers": [\n  {layers}\n ]\n}}\n', encoding="utf-8")


def _problem(detail: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{name}: there is no such field"
    problem = f"{name}: {detail['msg']}"
    return problem if detail["type"] == "missing" else f"{problem}, got {detail['input']!r}"
