"""How likely tokens were, by the model's own distribution (the convention is written at `TokenLogprob`).

Knows nothing of sampling: it is told which token stands at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ottserve.workers.api import TokenLogprob
from ottserve.workers.engine.readout import Fetched, Readout

MAX_TOP = 20
"""Likeliest tokens looked up for every row, so that what a row is told does not hang on the others' wishes."""

ROWS_PER_BLOCK = 128
"""Prompt positions whose logits exist at once."""

Head = Callable[[Tensor], Tensor]


def read_logprobs(
    readout: Readout, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> Callable[[Fetched], list[TokenLogprob]]:
    """Look up the tokens that were chosen.

    Args:
        readout: takes what has to reach the host.
        logits: `[S, V]` as the model gave them, any float dtype.
        token_ids: int64 `[S]`, the token at each position.
        num_top: S times, how many of the most likely tokens to tell, at most `MAX_TOP`.

    Returns:
        A function from what `readout` fetched to S results.
    """
    places = [readout.add(tensor) for tensor in (token_ids, *_look_up(logits, token_ids))]
    return lambda fetched: _tell([fetched[place].tolist() for place in places], num_top)


def read_prompt_logprobs(
    readout: Readout, head: Head, hidden: Tensor, token_ids: Sequence[int], num_top: int
) -> Callable[[Fetched], list[TokenLogprob]]:
    """Look up the tokens of a prompt, in blocks of rows: their logits never exist all at once.

    Args:
        readout: takes what has to reach the host.
        head: from hidden states `[n, U]` to logits `[n, V]`; U is the hidden size.
        hidden: `[T, U]`, what the model knew before each of the tokens.
        token_ids: T tokens.
        num_top: as for `read_logprobs`.

    Returns:
        A function from what `readout` fetched to T results.
    """
    tokens = torch.tensor(token_ids, device=hidden.device)
    blocks = zip(hidden.split(ROWS_PER_BLOCK), tokens.split(ROWS_PER_BLOCK), strict=True)
    readers = [read_logprobs(readout, head(rows), ids, [num_top] * len(ids)) for rows, ids in blocks]
    return lambda fetched: [each for reader in readers for each in reader(fetched)]


def _look_up(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs `[S]` of the tokens, and of the likeliest, `[S, N]`, with their ids `[S, N]`."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    top, top_ids = logprobs.topk(min(MAX_TOP, logits.shape[-1]), dim=-1)
    return chosen, top, top_ids


def _tell(columns: list[list[Any]], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Equal ones are told by rising id."""
    return [
        TokenLogprob(int(token_id), logprob, tuple(sorted(zip(map(int, ids), top, strict=True), key=_by_rank)[:count]))
        for token_id, logprob, top, ids, count in zip(*columns, num_top, strict=True)
    ]


def _by_rank(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]
