"""Pages and slots seen by layer. Allocates pages, knows no request and no step.

Layers whose pages are laid out alike and that follow each other share one tensor, so that an op over all layers is
one call a run: a single one where every layer is alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.slots import Slots
from ottserve.workers.core.kvspec import KVSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class LayerStore:
    """One layer: pages int16 `[P, J, W]` in their layout, slots `[S, J, …]`, and O as int32 `[1]`."""

    pages: Tensor
    slots: Slots
    layout: PageLayout
    pool_size: Tensor


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers that follow each other and are laid out alike.

    Attributes:
        layers: which ones.
        pages: int16 `[l, P, J, W]`; slots: tensors `[l, S, J, …]`.
        layout: of the pages.
        pool_sizes: int32 `[l]`, pool places by layer.
        flat_pages, flat_slots: all layers of the run as one, for ops over all at once.
    """

    layers: range
    pages: Tensor
    slots: Slots
    layout: PageLayout
    pool_sizes: Tensor
    flat_pages: Tensor
    flat_slots: Slots

    def by_layer(self) -> Iterator[LayerStore]:
        """The layers one by one."""
        for index in range(len(self.layers)):
            pool_size = self.pool_sizes[index : index + 1]
            yield LayerStore(self.pages[index], self.slots.layer(index), self.layout, pool_size)


def make_runs(
    spec: KVSpec, num_pages: int, slots: Slots, pool_sizes: Tensor, exact_dtype: torch.dtype
) -> tuple[LayerRun, ...]:
    """Allocate the pages of all layers.

    Args:
        spec: of the cache.
        num_pages: P, the dummy included.
        slots: of all layers, `[L, S, J, …]`; runs hold views of them.
        pool_sizes: int32 `[L]`.
        exact_dtype: of elements that pages keep exact.
    """
    layouts = [page_layout(spec, layer, exact_dtype) for layer in spec.layers]
    runs = []
    for layout, members in groupby(range(spec.num_layers), key=layouts.__getitem__):
        first, *others = members
        part = slice(first, first + 1 + len(others))
        shape = (part.stop - part.start, num_pages, spec.num_kv_heads, layout.words)
        pages = torch.zeros(shape, dtype=torch.int16, device=pool_sizes.device)
        own = slots.layers(part)
        layers = range(part.start, part.stop)
        runs.append(LayerRun(layers, pages, own, layout, pool_sizes[part], pages.flatten(0, 1), own.all_layers_flat()))
    return tuple(runs)


def page_layout(spec: KVSpec, layer: LayerSpec, exact_dtype: torch.dtype) -> PageLayout:
    """How the pages of a layer are laid out."""
    return PageLayout(
        group=spec.group,
        head_size=spec.head_size,
        k_bits=layer.k_bits,
        v_bits=layer.v_bits,
        k_subgroups=layer.k_subgroups,
        exact_dtype=exact_dtype,
        k_fine=layer.k_fine,
        k_fine_bits=layer.k_fine_bits,
        turns_keys=bool(spec.key_frequencies) and layer.k_bits < EXACT_BITS,
    )
