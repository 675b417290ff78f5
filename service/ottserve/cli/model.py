"""Options that name a model for commands which load it themselves, without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ottserve.workers.models.loading import LoadedModel

Model = Annotated[str, typer.Option(help="As the setting model.path.")]
Dtype = Annotated[str, typer.Option(help="As the setting model.dtype.")]
Device = Annotated[str, typer.Option(help="As the setting model.device.")]


def load(model: str, dtype: str, device: str) -> LoadedModel:
    """The model that options name; says on standard error what goes on. Raises ValueError as `load_model` does."""
    from ottserve.workers.models.loading import load_model
    from ottserve.workers.settings import ModelSettings

    settings = ModelSettings.model_validate({"path": model, "dtype": dtype, "device": device})
    return load_model(settings, lambda message: typer.echo(message, err=True))
