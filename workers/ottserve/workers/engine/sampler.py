"""From the model's logits to tokens and their logprobs. Knows no model, no grammar and no schedule.

What happens to a row's logits, in this order, each step left out for rows that did not ask for it:

1. `logit_bias` is added.
2. Penalties for tokens that were there before (`penalties.py`).
3. EOS and stop tokens are masked until there are `min_new_tokens`.
4. What the form of the answer does not permit is masked (`structured.py`).
5. Division by the temperature; 0 takes the likeliest and ends here.
6. `top_k`, of the distribution that is left.
7. `top_p`, of the distribution that is left, renormalised.
8. `min_p`, a share of the likeliest token.
9. One draw (`choice.py`).

Logprobs are of the logits before all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams, StopParams, TokenLogprob
from ottserve.workers.engine.choice import Draw, choose, rows_of, uniform
from ottserve.workers.engine.logprobs import Fetched, read_logprobs
from ottserve.workers.engine.penalties import History, TokenCounts, penalise
from ottserve.workers.engine.readout import Readout

NUM_CANDIDATES = 1024
"""Likeliest tokens that are sorted at first. Where they don't hold all that a row's cuts keep, all of it is sorted."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """How one row of logits chooses.

    Attributes:
        params, stops: of the request.
        history: the tokens so far; the next one's index in the completion follows from them.
        seed: of this sample's own stream.
        num_logprobs: likeliest tokens to tell beside the chosen one, None to tell nothing.
        permitted: int32 `[⌈V / 32⌉]` on the host, a bit for each token that the answer's form permits, or None.
    """

    params: SamplingParams
    stops: StopParams
    history: History
    seed: int
    num_logprobs: int | None = None
    permitted: Tensor | None = None

    @property
    def token_index(self) -> int:
        """Index of the token to choose within the completion."""
        return len(self.history.token_ids) - self.history.num_prompt

    @property
    def draw(self) -> Draw:
        """The parameters and the row's own random number."""
        return Draw(self.params, uniform(self.seed, self.token_index))


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, and its logprob where asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Chooses tokens; the only state is how often penalised sequences have used each token."""

    def __init__(self, counts: TokenCounts, eos_token_ids: Collection[int]) -> None:
        """`eos_token_ids`: what `min_new_tokens` holds back beside a request's own stop tokens."""
        self._counts = counts
        self._eos_token_ids = tuple(eos_token_ids)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[SampledRow], readout: Readout, num_candidates: int = NUM_CANDIDATES
    ) -> Callable[[Fetched], list[SampledToken]]:
        """Choose a token for each row.

        Args:
            logits: `[S, V]`, any float dtype; not changed, and not to be changed before the result is read.
            rows: S rows.
            readout: takes what has to reach the host.
            num_candidates: likeliest tokens that are sorted where a row is cut.

        Returns:
            A function from what `readout` fetched to S tokens. It computes, and waits for, the rows that need more
            candidates; there are few.
        """
        token_ids, is_right = self._choose(logits, rows, num_candidates)
        places = readout.add(token_ids), readout.add(is_right)
        asked = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
        num_top = [row.num_logprobs for row in rows if row.num_logprobs is not None]
        tell = read_logprobs(readout, rows_of(logits, asked), token_ids[asked], num_top) if asked else None

        def read(fetched: Fetched) -> list[SampledToken]:
            chosen, right = (fetched[place].long().tolist() for place in places)
            logprobs = dict(zip(asked, tell(fetched), strict=True)) if tell else {}
            tokens = [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(chosen)]
            wrong = [i for i, is_right in enumerate(right) if not is_right]
            for i, token in zip(wrong, self._sample_of_all(logits, rows, wrong), strict=True):
                tokens[i] = token
            return tokens

        return read

    def _sample_of_all(self, logits: Tensor, rows: Sequence[SampledRow], index: list[int]) -> list[SampledToken]:
        if not index:
            return []
        readout = Readout()
        read = self.sample(logits[index], [rows[i] for i in index], readout, logits.shape[-1])
        return read(readout.fetch())

    def _choose(self, logits: Tensor, rows: Sequence[SampledRow], num_candidates: int) -> tuple[Tensor, Tensor]:
        """Rows whose logits are adjusted are chosen apart, so that the others need no copy."""
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        is_right = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
        is_adjusted = [self._is_adjusted(row) for row in rows]
        for wanted in set(is_adjusted):
            index = [i for i, is_so in enumerate(is_adjusted) if is_so is wanted]
            group = [rows[i] for i in index]
            own = self._adjust(logits[index].float(), group) if wanted else rows_of(logits, index).float()
            token_ids[index], is_right[index] = choose(own, [row.draw for row in group], num_candidates)
        return token_ids, is_right

    def _is_adjusted(self, row: SampledRow) -> bool:
        params = row.params
        return bool(params.logit_bias or params.penalises or self._barred(row) or row.permitted is not None)

    def _adjust(self, logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
        """Steps 1 to 4 on float32 `[S, V]`, in place."""
        _add_at(logits, [row.params.logit_bias for row in rows])
        penalised = [i for i, row in enumerate(rows) if row.params.penalises]
        if penalised:
            in_prompt, num_times = self._counts.of([rows[i].history for i in penalised])
            params = [rows[i].params for i in penalised]
            logits[penalised] = penalise(logits[penalised], in_prompt, num_times, params)
        _add_at(logits, [[(token_id, -torch.inf) for token_id in self._barred(row)] for row in rows])
        formed = [(i, row.permitted) for i, row in enumerate(rows) if row.permitted is not None]
        if formed:
            bits = torch.stack([permitted for _, permitted in formed]).to(logits.device, non_blocking=True)
            logits[[i for i, _ in formed]] = _mask(logits[[i for i, _ in formed]], bits)
        return logits

    def _barred(self, row: SampledRow) -> tuple[int, ...]:
        """What must not be chosen yet."""
        stops = row.stops
        if row.token_index >= stops.min_new_tokens:
            return ()
        return stops.stop_token_ids + (() if stops.ignore_eos else self._eos_token_ids)


def _add_at(logits: Tensor, changes: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Add to single logits of each row, in place."""
    flat = [(i, token_id, value) for i, row in enumerate(changes) for token_id, value in row]
    if flat:
        rows, token_ids, values = zip(*flat, strict=True)
        places = torch.tensor([rows, token_ids], device=logits.device)
        logits.index_put_(tuple(places), torch.tensor(values, device=logits.device), accumulate=True)


def _mask(logits: Tensor, bits: Tensor) -> Tensor:
    """−∞ wherever a bit is 0; `[S, V]` by int32 `[S, ⌈V / 32⌉]`."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_permitted = (bits.unsqueeze(-1) >> places & 1).flatten(1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~is_permitted, -torch.inf)
