"""A text fed to the model through one policy's cache, a piece at a time, the way the engine computes prompts.

Nothing is sampled: the text itself says which token comes next. Knows no measure.
"""

from __future__ import annotations

from torch import Tensor

from ottserve.evaluation.attention import AttentionErrors, AttentionWatch
from ottserve.evaluation.piece import SLOT_ID, piece_step
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.engine.loading import make_store
from ottserve.workers.engine.runner import Runner
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import CacheSettings, EngineSettings, SchedulerSettings


class TextStream:
    """One sequence of at most `num_tokens` tokens in a cache of its own."""

    def __init__(self, model: LoadedModel, cache: CacheSettings, num_tokens: int, *, watched: bool = False) -> None:
        """Allocate the cache.

        Args:
            watched: whether to measure attention too, which takes memory for all keys and values at full precision.

        Raises:
            ValueError: the cache is impossible over this model; names the setting.
        """
        num_pages = resolve_spec(cache, model.shape).sealed_pages(num_tokens)
        settings = EngineSettings(
            cache=cache.model_copy(update={"num_pages": max(2, num_pages)}),
            scheduler=SchedulerSettings(max_running=1),  # type: ignore[call-arg]
        )
        self._store = make_store(settings, model)
        self._watch = AttentionWatch(model, self.spec, num_tokens) if watched else None
        self._runner = Runner(
            (model.with_rotated_values() if self.spec.rotate_values else model).module,
            self._store,
            OpenStep if self._watch is None else self._watch.open_step,
        )
        self._num_stored = 0

    @property
    def spec(self) -> KVSpec:
        """The cache by formula."""
        return self._store.spec

    @property
    def page_bytes_per_token(self) -> float:
        """Page bytes of a token over all layers, measured from the storage of the pages."""
        return self._store.page_bytes / self.spec.group

    @property
    def page_bits_per_element(self) -> float:
        """Bits of a sealed element with scales, zeros and masks, measured from the storage of the pages."""
        spec = self.spec
        return self.page_bytes_per_token * 8 / (2 * spec.num_layers * spec.num_kv_heads * spec.head_size)

    @property
    def num_frozen_heads(self) -> int:
        """(layer, KV head) pairs whose evicted pool was full when another outlier came."""
        return self._store.pool_state([SLOT_ID]).frozen_heads

    @property
    def attention_errors(self) -> AttentionErrors | None:
        """What attention has lost so far; None without a watch or a sealed page."""
        return None if self._watch is None else self._watch.errors

    def advance(self, token_ids: tuple[int, ...]) -> Tensor:
        """Compute and store the next tokens, which must not reach over a seal point.

        Returns:
            Logits `[len(token_ids), V]`.
        """
        logits = self._runner.run(piece_step(self.spec, self._num_stored, token_ids, self._store.device))
        self._num_stored += len(token_ids)
        return logits
