"""How sure a model is of an answer that it is made to give, token by token. Knows no cache and no task."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """One answer under teacher forcing.

    Attributes:
        nll: mean of −ln p over its tokens, nats.
        margin: p of the answer less that of the likeliest wrong one. A wrong one counts by its first tokens, up to the
            first that differs, so that the margin is exact for answers of one token and a lower bound for longer ones.
        exact: whether greedy decoding gives the answer: each of its tokens is the likeliest.
    """

    nll: float
    margin: float
    exact: bool


def score_answer(logits: Tensor, answer: tuple[int, ...], wrong: Iterable[tuple[int, ...]] = ()) -> AnswerScore:
    """Score an answer of A tokens.

    Args:
        logits: `[A, V]`, at the positions before each token of the answer, the answer's tokens having been fed.
        answer: its tokens.
        wrong: other answers; one that is equal, or goes on where the answer ends, or ends within it, does not count.
    """
    logp = logits.float().log_softmax(-1)
    steps = [logp[index, token].item() for index, token in enumerate(answer)]
    parted = {(index, other[index]) for other in wrong if (index := _first_difference(answer, other)) is not None}
    rivals = [sum(steps[:index]) + logp[index, token].item() for index, token in parted]
    best_wrong = max(rivals, default=float("-inf"))
    return AnswerScore(
        nll=-sum(steps) / len(steps),
        margin=math.exp(sum(steps)) - math.exp(best_wrong),
        exact=logp.argmax(-1).tolist() == list(answer),
    )


def _first_difference(answer: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    pairs = enumerate(zip(answer, other, strict=False))
    return next((index for index, (mine, its) in pairs if mine != its), None)
