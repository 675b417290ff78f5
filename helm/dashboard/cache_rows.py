"""Rows on the cache. Knows the metrics, not Grafana."""

from __future__ import annotations

from panels import Kind, Panel, Row, Unit
from queries import rate, series, share, total

PAGES = "ottserve_kv_pages"
PLACES = "ottserve_outlier_places"
PROMPT = "ottserve_prompt_tokens_total"
USED = 'state="used"'

KV_MEMORY = Row(
    "KV memory",
    (
        Panel(
            "Memory",
            Unit.BYTES,
            {"{{kind}}, {{state}}": total("ottserve_kv_memory_bytes", by="kind, state")},
            "Pages, tails and outlier pools by state; the sum is what was allocated.",
            Kind.STACKED,
        ),
        Panel(
            "Pages",
            Unit.NUMBER,
            {"{{state}}": total(PAGES, by="state")},
            "Used by requests, cached for reuse, free.",
            Kind.STACKED,
        ),
        Panel(
            "Slots",
            Unit.NUMBER,
            {"{{state}}": total("ottserve_slots", by="state")},
            "Sequences that can be computed together.",
            Kind.STACKED,
        ),
        Panel(
            "Bits an element",
            Unit.NUMBER,
            {"{{instance}}": series("ottserve_kv_bits_per_element")},
            "Page bits of a stored element, scales, zeros and masks included.",
            Kind.NOW,
            6,
        ),
        Panel(
            "Bytes a token",
            Unit.BYTES,
            {"{{instance}}": series("ottserve_kv_bytes_per_token")},
            "Page bytes of a token over all layers.",
            Kind.NOW,
            6,
        ),
        Panel(
            "Token capacity",
            Unit.NUMBER,
            {"tokens": total("ottserve_kv_token_capacity")},
            "Tokens that all pages hold together.",
            Kind.NOW,
            6,
        ),
        Panel(
            "Preemptions",
            Unit.PER_S,
            {"preempted": rate("ottserve_preemptions_total")},
            "Running sequences put back to wait.",
            Kind.NOW,
            6,
        ),
        Panel(
            "Pages sealed",
            Unit.PER_S,
            {"{{instance}}": rate("ottserve_pages_sealed_total", by="instance")},
            "Pages filled a second.",
        ),
    ),
)

OUTLIERS = Row(
    "Outlier pool",
    (
        Panel(
            "Occupancy",
            Unit.SHARE,
            {
                name: share(total(PLACES, f'pool="{name}",{USED}'), total(PLACES, f'pool="{name}"'))
                for name in ("pool", "evicted")
            },
            "Places in use, of those of the running sequences.",
            max=1,
        ),
        Panel(
            "Places",
            Unit.NUMBER,
            {"{{pool}}, {{state}}": total(PLACES, by="pool, state")},
            "Exact tokens of the running sequences.",
            Kind.STACKED,
        ),
        Panel(
            "Frozen heads",
            Unit.NUMBER,
            {"{{instance}}": total("ottserve_outlier_frozen_heads", by="instance")},
            "Sequence, layer, head triples whose evicted pool is full: they admit no more outliers.",
        ),
    ),
)

PREFIX_CACHE = Row(
    "Prefix cache",
    (
        Panel(
            "Prompt tokens from cache",
            Unit.SHARE,
            {"share": share(rate(PROMPT, 'source="cached"'), rate(PROMPT))},
            "Prompt tokens that were not computed again, of all.",
            max=1,
        ),
        Panel(
            "Cached pages",
            Unit.NUMBER,
            {"{{instance}}": total(PAGES, 'state="cached"', "instance")},
            "Pages that no request holds and a later one may.",
        ),
        Panel(
            "Cached pages given up",
            Unit.PER_S,
            {"{{instance}}": rate("ottserve_pages_evicted_total", by="instance")},
            "To make room.",
        ),
        Panel(
            "Host memory",
            Unit.BYTES,
            {"{{kind}}": total("ottserve_host_memory_bytes", by="kind")},
            "Outliers beside cached prefixes, and preempted requests.",
            Kind.STACKED,
        ),
    ),
)
