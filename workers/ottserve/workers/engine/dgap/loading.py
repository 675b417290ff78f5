"""The correction that the settings name, over the model and the cache that are there. Knows no training."""

from __future__ import annotations

from pathlib import Path

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.engine.dgap.artefact import Subject, read_artefact
from ottserve.workers.engine.dgap.correction import Correction
from ottserve.workers.kv.store import KVStore
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import CorrectionSettings


def subject_of(model: LoadedModel, spec: KVSpec) -> Subject:
    """What a correction of this model over this cache is for."""
    return Subject(model.shape.fingerprint, spec.fingerprint, model.info.vocab_size)


def load_correction(settings: CorrectionSettings, model: LoadedModel, store: KVStore) -> Correction | None:
    """The correction of `settings.path`, None without one.

    Raises:
        ValueError: as `read_artefact`.
    """
    if settings.path is None:
        return None
    try:
        artefact = read_artefact(Path(settings.path), subject_of(model, store.spec))
    except ValueError as error:
        raise ValueError(f"correction.path={error}") from None
    return Correction(artefact, settings.threshold, store.num_slots, store.device)
