"""All settings of `ottserve serve` in one value: flags over environment over YAML file over defaults.

The names are the same in all three places. An unknown name is an error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic_settings
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, YamlConfigSettingsSource
from pydantic_settings import PydanticBaseSettingsSource as Source

from ottserve.service.settings import GatewaySettings
from ottserve.workers.settings import DeploymentSettings, EngineSettings, FurtherModel

PREFIX = "OTTSERVE_"
CLIENT_VARIABLES = {"OTTSERVE_TARGET", "OTTSERVE_TOKEN", "OTTSERVE_CA_FILE", "OTTSERVE_CLIENT_CERT"}


class SettingsError(Exception):
    """Settings that can't be used; the message names each of them."""


class ServeSettings(BaseSettings, EngineSettings):
    """Everything that one service needs to start: the replica's settings, and those of what is around it."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    gateway: GatewaySettings = GatewaySettings()  # type: ignore[call-arg]
    deployment: DeploymentSettings = DeploymentSettings()  # type: ignore[call-arg]
    models: Annotated[
        tuple[FurtherModel, ...], Field(description="Further models, each with sections of its own as these.")
    ] = ()

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        gateway = self.gateway
        most = sum(model.deployment.most_replicas for model in self.all_models)
        for port in filter(None, (model.metrics.port for model in self.all_models)):
            if most > 1:
                raise ValueError(
                    f"metrics.port={port}: the {most} replicas that one machine may have need a port each; "
                    "0 takes free ones"
                )
            if port in (gateway.port, gateway.http_port, gateway.tls.health_port, gateway.metrics.port):
                raise ValueError(f"metrics.port={port} is the gateway's too")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [model.model.name or model.model.path for model in self.all_models]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"models: {', '.join(sorted(twice))} is there twice; give each a model.name of its own")
        return self

    @property
    def all_models(self) -> tuple[FurtherModel, ...]:
        """Every model with its replicas, the first one first."""
        return FurtherModel(**dict(self.engine), deployment=self.deployment), *self.models

    @property
    def engine(self) -> EngineSettings:
        """The replica's part."""
        return EngineSettings(**{name: getattr(self, name) for name in EngineSettings.model_fields})


def read_settings(config: Path | None, flags: Sequence[str]) -> ServeSettings:
    """Settings from flags like `--cache.policy fp16`, `OTTSERVE_CACHE__POLICY`, and a YAML file, first one wins.

    Raises:
        SettingsError: naming each setting that is unknown, impossible, or contradicts another.
    """
    _refuse_unknown_variables()

    class Sources(ServeSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: Source,
            env_settings: Source,
            dotenv_settings: Source,
            file_secret_settings: Source,
        ) -> tuple[Source, ...]:
            cli = CliSettingsSource[Any](settings_cls, cli_parse_args=list(flags), cli_exit_on_error=False)
            return cli, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config)

    try:
        return Sources()
    except ValidationError as error:
        raise SettingsError("\n       ".join(_problem(detail) for detail in error.errors())) from None
    except (pydantic_settings.SettingsError, yaml.YAMLError) as error:
        raise SettingsError(str(error)) from None
    except (ValueError, TypeError):  # as dict() raises them: a list, text, no text
        raise SettingsError(f"{config}: expected sections such as `cache:`") from None


def describe() -> Iterator[str]:
    """One line a setting: name, default, description."""
    yield from _describe(ServeSettings, "")


def _describe(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _describe(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix + name:<42} {field.default!s:<24} {field.description or ''}".rstrip()


def _refuse_unknown_variables() -> None:
    """Of the environment, pydantic-settings reads what it knows and passes over the rest."""
    for variable in os.environ:
        name = variable.removeprefix(PREFIX).partition("__")[0].lower()
        if variable.startswith(PREFIX) and variable not in CLIENT_VARIABLES and name not in ServeSettings.model_fields:
            raise SettingsError(f"{variable}: there is no such setting (`ottserve settings` lists all)")


def _problem(detail: Mapping[str, Any]) -> str:
    """One line naming the setting, what is wrong and what was given."""
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{name}: there is no such setting (`ottserve settings` lists all)"
    if not name:
        return str(detail["msg"]).removeprefix("Value error, ")
    problem = f"{name}: {detail['msg'].removeprefix('Value error, ')}"
    return problem if isinstance(detail["input"], Mapping) else f"{problem}, got {detail['input']!r}"
