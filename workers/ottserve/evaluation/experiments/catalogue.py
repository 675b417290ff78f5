"""The experiments: which rows stand beside each other, and what is asked of them. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.method import Method
from ottserve.evaluation.experiments.ours import (
    ACCURATE,
    BALANCED,
    BALANCED_AND_SPARSE,
    FINER,
    FOUR_BIT_KEYS,
    KIVI,
    LEAN,
    ONE_BIT_KEYS,
    OTT,
    ROTATED_KEYS,
    UNEVEN_KEYS,
    UNEVEN_VALUES,
)
from ottserve.evaluation.experiments.quantisers import Affine, Axis
from ottserve.evaluation.experiments.rivals.dropping import HeavyHitters, SnapKV, StreamingLLM
from ottserve.evaluation.experiments.rivals.gear import gear
from ottserve.evaluation.experiments.rivals.innerq import innerq
from ottserve.evaluation.experiments.rivals.kvquant import kvquant
from ottserve.evaluation.experiments.rivals.rotatekv import rotatekv
from ottserve.evaluation.experiments.rivals.zipcache import ZipCache
from ottserve.evaluation.experiments.tracing import Keep, Trace
from ottserve.evaluation.experiments.variants import AS_IT_IS, WITH_KEY_BIAS, Variant

COUNT_FROM = 288
"""First position that counts in every row: the largest G + R there is, so that rows of other sizes compare."""
FIRST_FOUR = Trace("first", places=4, first_layer=0)


@dataclass(frozen=True, slots=True)
class Row:
    """A method by name, on a model as it is or changed."""

    name: str
    method: Method
    variant: Variant = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Experiment:
    """Rows that answer a question.

    Attributes:
        by_bits: whether rows differ in bytes on purpose, so that the plot has bits as an axis.
    """

    name: str
    question: str
    rows: tuple[Row, ...]
    by_bits: bool = False


def _traced(keep: Keep, places: int = 3) -> Coded:
    return replace(OTT, trace=Trace(keep, places=places))


def _axes(keys: Axis, values: Axis) -> Row:
    return Row(f"K per {keys}, V per {values}", Coded(Affine(2, keys), Affine(2, values)))


def _layers(name: str, first: int, end: int | None) -> Row:
    return Row(name, replace(OTT, trace=Trace(first_layer=first, end_layer=end)))


def _around_rope(name: str, method: Coded, variant: Variant = AS_IT_IS) -> tuple[Row, Row]:
    label = f"{name}, {variant.name}" if variant.name else name
    return (
        Row(f"{label}, after RoPE", method, variant),
        Row(f"{label}, before RoPE", replace(method, before_rope=True), variant),
    )


EXPERIMENTS = (
    Experiment(
        "axes",
        "Which elements should share a scale: those of a channel or those of a token?",
        (
            _axes("channel", "token"),
            _axes("channel", "channel"),
            _axes("token", "token"),
            _axes("token", "channel"),
        ),
    ),
    Experiment(
        "tokens",
        "Which tokens are worth an exact place?",
        (
            Row("none (KIVI)", KIVI),
            Row("smallest keys (OTT)", _traced("smallest")),
            Row("random", _traced("random")),
            Row("the first of the text", _traced("first")),
            Row("largest keys", _traced("largest")),
            Row("most attended", _traced("attended")),
        ),
    ),
    Experiment(
        "places",
        "How many pool places are enough?",
        tuple(Row(f"O = {places}", _traced("smallest", places)) for places in (0, 1, 2, 3, 4, 8)),
    ),
    Experiment(
        "layers",
        "Which layers need a pool?",
        (
            Row("none", KIVI),
            _layers("all", 0, None),
            _layers("all but 0 and 1", 2, None),
            _layers("all but 0 to 3", 4, None),
            _layers("all but 0 to 9", 10, None),
            _layers("only 0 and 1", 0, 2),
        ),
    ),
    Experiment(
        "sizes",
        "What do the exact window R and the group G cost and give?",
        (
            *(Row(f"G = {group}, R = 32", replace(OTT, group=group)) for group in (32, 64, 128, 256)),
            *(Row(f"G = 128, R = {window}", replace(OTT, window=window)) for window in (8, 64, 128)),
        ),
        by_bits=True,
    ),
    Experiment(
        "rope",
        "Should keys be stored before or after rotary positions, also where they have a large bias?",
        (
            *_around_rope("KIVI", KIVI),
            *_around_rope("OTT", OTT),
            *_around_rope("lean", LEAN),
            *_around_rope("balanced", BALANCED),
            *_around_rope("OTT", OTT, WITH_KEY_BIAS),
            *_around_rope("balanced", BALANCED, WITH_KEY_BIAS),
        ),
    ),
    Experiment(
        "levels",
        "Should levels lie where a normal distribution has its mass, instead of evenly?",
        (
            Row("ours, balanced", BALANCED),
            Row("ours, balanced, uneven values", replace(BALANCED, values=UNEVEN_VALUES)),
            Row("ours, 4-bit keys", FOUR_BIT_KEYS),
            Row("ours, 4-bit keys, uneven values", replace(FOUR_BIT_KEYS, values=UNEVEN_VALUES)),
            Row("ours, 4-bit keys, uneven keys", replace(FOUR_BIT_KEYS, keys=UNEVEN_KEYS)),
        ),
    ),
    Experiment(
        "rivals",
        "What do others give for the same bytes?",
        (
            Row("KIVI", KIVI),
            Row("KIVI, first 4 tokens exact", replace(KIVI, trace=FIRST_FOUR)),
            Row("OTT", OTT),
            Row("ours, lean", LEAN),
            Row("ours, 1-bit keys, 32 fine channels", ONE_BIT_KEYS),
            Row("ours, balanced", BALANCED),
            Row("ours, 32 fine channels", FINER),
            Row("ours, 4-bit keys", FOUR_BIT_KEYS),
            Row("ours, accurate", ACCURATE),
            Row("KVQuant, 1 % sparse", kvquant(0.01)),
            Row("KVQuant, 0.3 % sparse", kvquant(0.003)),
            Row("RotateKV", rotatekv(2)),
            Row("InnerQ, 3 bit", innerq(3, 32)),
            Row("InnerQ, 2 bit", innerq(2, 32)),
            Row("GEAR, rank 1, 1 % sparse", gear(1, 0.01)),
            Row("GEAR, rank 0, 1 % sparse", gear(0, 0.01)),
            Row("ZipCache, 10 % salient", ZipCache(0.1)),
            Row("StreamingLLM, 15 % of tokens", StreamingLLM(0.15)),
            Row("H2O, 15 % of tokens", HeavyHitters(0.15)),
            Row("SnapKV, 15 % of tokens", SnapKV(0.15)),
        ),
        by_bits=True,
    ),
    Experiment(
        "taken",
        "What would ours gain from theirs?",
        (
            Row("ours, balanced", BALANCED),
            Row("ours, balanced, before RoPE (KVQuant, RotateKV)", replace(BALANCED, before_rope=True)),
            Row("ours, balanced, 0.3 % sparse keys (KVQuant, GEAR)", BALANCED_AND_SPARSE),
            Row("ours, balanced, most attended exact (H2O)", replace(BALANCED, trace=Trace("attended"))),
            Row("ours, balanced, first 4 exact (InnerQ)", replace(BALANCED, trace=FIRST_FOUR)),
            Row("ours, 1-bit keys, 32 fine channels", ONE_BIT_KEYS),
            Row("ours, 1-bit keys, 32 fine channels, before RoPE", replace(ONE_BIT_KEYS, before_rope=True)),
            Row("ours, keys rotated over heads (RotateKV)", ROTATED_KEYS),
            Row("ours, keys rotated over heads, before RoPE", replace(ROTATED_KEYS, before_rope=True)),
        ),
        by_bits=True,
    ),
)  # fmt: skip


def experiments(names: list[str]) -> tuple[Experiment, ...]:
    """Those named, all if none is.

    Raises:
        ValueError: there is none of a name; says which there are.
    """
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise ValueError(f"experiments: {name!r} is none of {', '.join(known)}")
    return tuple(known[name] for name in names) if names else EXPERIMENTS
