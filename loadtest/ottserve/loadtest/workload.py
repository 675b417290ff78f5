"""What is asked of the service, read from a YAML file. Unknown names are errors. Calls nobody."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of fields that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Length(Section):
    """Tokens, uniform between two bounds."""

    least: int = Field(ge=1, description="Smallest.")
    most: int = Field(ge=1, description="Largest.")

    def draw(self, random: Random) -> int:
        """One length."""
        return random.randint(self.least, max(self.least, self.most))


class RequestKind(Section):
    """One kind of request of a mix."""

    name: str = Field(min_length=1, description="Told apart in locust's own table.")
    weight: float = Field(1.0, gt=0, description="Share in the mix, relative to the other kinds.")
    prompt_tokens: Length = Field(description="Length of the prompt, the shared part included.")
    answer_tokens: Length = Field(description="Length of the answer; its end token is ignored, so the length is exact.")
    shared_prefix_tokens: int = Field(0, ge=0, description="Tokens that prompts of one prefix have in common.")
    num_prefixes: int = Field(1, ge=1, description="Different shared beginnings.")
    cancelled_share: float = Field(0.0, ge=0, le=1, description="Requests that leave after half of the answer.")


class ClosedLoop(Section):
    """Callers that each wait for their answer before they ask again: load follows the service."""

    loop: Literal["closed"]
    num_callers: int = Field(ge=1, description="Requests in flight at once.")
    think_s: float = Field(0.0, ge=0, description="Mean pause of a caller between answer and next request.")


class OpenLoop(Section):
    """Requests that come whether or not the service keeps up."""

    loop: Literal["open"]
    requests_per_s: float = Field(gt=0, description="Mean rate.")
    burstiness: float = Field(1.0, gt=0, description="Shape of the gamma distribution of gaps: 1 Poisson, less bursts.")
    max_in_flight: int = Field(4096, ge=1, description="More than that are dropped and counted as such.")


class Limits(Section):
    """A request counts as good when it keeps all of them."""

    first_token_s: float | None = Field(None, gt=0)
    per_token_s: float | None = Field(None, gt=0, description="TPOT, time per token after the first.")


class Objectives(Section):
    """What the run as a whole must reach; the exit status tells whether it did."""

    first_token_p99_s: float | None = Field(None, gt=0)
    per_token_p99_s: float | None = Field(None, gt=0)
    inter_token_p99_s: float | None = Field(None, gt=0)
    failed_share: float | None = Field(0.0, ge=0, le=1, description="Failed requests of those that ended.")
    good_share: float | None = Field(None, ge=0, le=1, description="Completed requests within `limits`.")


class Workload(Section):
    """A load test, but for where it is sent."""

    about: str = Field(description="What it stands for.")
    seed: int = Field(0, ge=0, description="Makes prompts, lengths and arrivals the same each time.")
    duration_s: float = Field(60.0, gt=0, description="Time in which requests start, warm-up included.")
    warm_up_s: float = Field(5.0, ge=0, description="Requests that start before count in no latency.")
    timeout_s: float = Field(120.0, gt=0, description="Deadline of a request.")
    arrivals: Annotated[ClosedLoop | OpenLoop, Field(discriminator="loop")]
    requests: tuple[RequestKind, ...] = Field(min_length=1)
    limits: Limits = Limits()  # type: ignore[call-arg]
    objectives: Objectives = Objectives()  # type: ignore[call-arg]


def read_workload(path: Path, overrides: dict[str, object] | None = None) -> Workload:
    """A workload from a file, some top-level fields replaced.

    Raises:
        ValueError: names each field that is unknown or impossible.
    """
    fields = yaml.safe_load(path.read_text())
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected fields such as `arrivals:`")
    return Workload.model_validate(fields | (overrides or {}))
