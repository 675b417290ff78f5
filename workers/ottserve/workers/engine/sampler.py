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

Logprobs are of the logits before all of this, but after a correction (`dgap/`), where one is set.

Sampling has a host's part, which comes before the model runs, and a device's part, which waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams, StopParams, TokenLogprob
from ottserve.workers.engine.adjust import Adjustments, Wishes
from ottserve.workers.engine.choice import Draw, Draws, Way, choose, pack_draws
from ottserve.workers.engine.logprobs import read_logprobs
from ottserve.workers.engine.pack import Pack, Place, Sent
from ottserve.workers.engine.penalties import History, TokenCounts
from ottserve.workers.engine.readout import Fetched, Readout
from ottserve.workers.engine.uniforms import mixed, uniforms

NUM_CANDIDATES = 1024
"""Likeliest tokens that are sorted at first. Where they don't hold all that a row's cuts keep, all of it is sorted."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sample chooses its tokens: what is the same for all of them.

    Attributes:
        params, stops: of the request.
        draw: the same as `params` says, as `choice.py` takes it.
        mixed_seed: of this sample's own stream, as `uniforms.py` takes it.
        may_adjust: whether logits may have to be changed at some token, a form of the answer left out.
        num_logprobs: likeliest tokens to tell beside the chosen one, None to tell nothing.
    """

    params: SamplingParams
    stops: StopParams
    draw: Draw
    mixed_seed: int
    may_adjust: bool
    num_logprobs: int | None

    @classmethod
    def by(cls, params: SamplingParams, stops: StopParams, seed: int, num_logprobs: int | None = None) -> Sampling:
        """As a request asks for it; `seed` is this sample's own."""
        may_adjust = bool(params.logit_bias or params.penalises or stops.min_new_tokens)
        return cls(params, stops, Draw.by(params), int(mixed([seed])[0]), may_adjust, num_logprobs)


class SampledRow(NamedTuple):
    """How one row of logits chooses.

    Attributes:
        sampling: what is the same at each of its tokens.
        history: the tokens so far; the next one's index in the completion follows from them.
        permitted: int32 `[⌈V / 32⌉]` on the host, a bit for each token that the answer's form permits, or None.
    """

    sampling: Sampling
    history: History
    permitted: Tensor | None = None

    @property
    def token_index(self) -> int:
        """Index of the token to choose within the completion."""
        return len(self.history.token_ids) - self.history.num_prompt


class SampledToken(NamedTuple):
    """A chosen token.

    Attributes:
        token_id: the token.
        logprob: how likely it was, where asked for.
        is_on_device: whether it is what `Sampled.token_ids` has; another may be there where the row needed more
            candidates.
        has_numbers: whether the row's logits were numbers; if not, the token means nothing.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    is_on_device: bool = True
    has_numbers: bool = True


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rows of a step have chosen.

    Attributes:
        token_ids: int64 `[S]` on the device, right but for rows that need more candidates.
        read: from what was fetched to S tokens. It computes, and waits for, the rows that need more candidates; there
            are few.
    """

    token_ids: Tensor
    read: Callable[[Fetched], list[SampledToken]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The host's part of sampling, in a pack.

    Attributes:
        ways: how each row draws.
        uniforms: the number that each draws with.
        draws: both, where a row draws at all.
        adjustments: what is done to logits before; None where no row asks for anything, or it has been done.
        told: by row, how many of the likeliest tokens are told beside its own.
        told_rows: the rows of `told`.
    """

    ways: Sequence[Draw]
    uniforms: Sequence[float]
    draws: Draws
    adjustments: Adjustments | None
    told: dict[int, int]
    told_rows: Place | None

    @classmethod
    def of(
        cls,
        pack: Pack,
        ways: Sequence[Draw],
        uniforms: Sequence[float],
        told: dict[int, int],
        adjustments: Adjustments | None = None,
    ) -> Prepared:
        """Put into `pack` how rows draw, and which are told of."""
        drawn = any(draw.way is not Way.LIKELIEST for draw in ways)
        draws = pack_draws(pack, ways, uniforms) if drawn else Draws(None, None)
        return cls(ways, uniforms, draws, adjustments, told, pack.indices(list(told)) if told else None)

    @property
    def needs_logits(self) -> bool:
        """Whether the logits may be read again once the tokens are read."""
        return self.draws.of_some is not None

    def again(self, pack: Pack, index: Sequence[int]) -> Prepared:
        """The same for some rows, whose logits have been adjusted, with the same numbers."""
        told = {place: self.told[row] for place, row in enumerate(index) if row in self.told}
        return Prepared.of(pack, [self.ways[row] for row in index], [self.uniforms[row] for row in index], told)


class Sampler:
    """Chooses tokens; the only state is how often penalised sequences have used each token."""

    def __init__(self, counts: TokenCounts, eos_token_ids: Collection[int]) -> None:
        """`eos_token_ids`: what `min_new_tokens` holds back beside a request's own stop tokens."""
        self._counts = counts
        self._eos_token_ids = tuple(eos_token_ids)

    def prepare(self, pack: Pack, rows: Sequence[SampledRow]) -> Prepared:
        """Put into `pack` all that the rows ask for."""
        asking = [row for row, each in enumerate(rows) if each.sampling.may_adjust or each.permitted is not None]
        wishes = {row: its for row in asking if (its := self._wishes(rows[row])).is_any}
        told = {row: num for row, each in enumerate(rows) if (num := each.sampling.num_logprobs) is not None}
        adjustments = Adjustments(pack, self._counts, wishes) if wishes else None
        return Prepared.of(pack, [row.sampling.draw for row in rows], _uniforms(rows), told, adjustments)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, prepared: Prepared, sent: Sent, readout: Readout, num_candidates: int = NUM_CANDIDATES
    ) -> Sampled:
        """Choose a token for each row.

        Args:
            logits: `[S, V]`, any float dtype; not changed, and where `prepared.needs_logits`, not to be changed before
                the result is read.
            prepared: S rows.
            sent: what came of the pack they are in.
            readout: takes what has to reach the host.
            num_candidates: likeliest tokens that are sorted where a row is cut.
        """
        adjusted = logits
        if prepared.adjustments is not None:
            adjusted = logits.to(torch.float32, copy=True)
            prepared.adjustments.apply(adjusted, sent)
        return self._sample(logits, adjusted, prepared, sent, readout, num_candidates)

    def _sample(
        self, logits: Tensor, adjusted: Tensor, prepared: Prepared, sent: Sent, readout: Readout, num_candidates: int
    ) -> Sampled:
        largest, likeliest = logits.max(dim=-1)  # tells of numbers, too: NaN and +∞ come out on top
        if adjusted is not logits:
            likeliest = adjusted.argmax(dim=-1)
        token_ids, is_right = choose(adjusted, likeliest, prepared.draws, sent, num_candidates)
        top, chosen = readout.add(largest), readout.add(token_ids)
        right = None if is_right is None else readout.add(is_right)
        tell = None
        if prepared.told_rows is not None:
            rows = sent[prepared.told_rows]
            tell = read_logprobs(readout, logits[rows], token_ids[rows], list(prepared.told.values()))

        def read(fetched: Fetched) -> list[SampledToken]:
            ids = fetched[chosen].long().tolist()
            logprobs = dict(zip(prepared.told, tell(fetched), strict=True)) if tell else {}
            numbers = fetched[top].isfinite().tolist()
            tokens = [
                SampledToken(token_id, logprobs.get(row), has_numbers=has_numbers)
                for row, (token_id, has_numbers) in enumerate(zip(ids, numbers, strict=True))
            ]
            if right is not None and prepared.draws.of_some is not None:
                of_some = zip(prepared.draws.of_some.index, fetched[right].tolist(), strict=True)
                wrong = [row for row, is_so in of_some if not is_so]
                for row, token in zip(wrong, self._sample_of_all(logits, adjusted, prepared, wrong), strict=True):
                    tokens[row] = token._replace(is_on_device=token.token_id == ids[row])
            return tokens

        return Sampled(token_ids, read)

    @torch.inference_mode()
    def _sample_of_all(
        self, logits: Tensor, adjusted: Tensor, prepared: Prepared, index: list[int]
    ) -> list[SampledToken]:
        if not index:
            return []
        pack, readout = Pack(), Readout()
        again, rows = prepared.again(pack, index), pack.indices(index)
        sent = pack.send(logits.device)
        own = logits[sent[rows]]
        own_adjusted = own if adjusted is logits else adjusted[sent[rows]]
        sampled = self._sample(own, own_adjusted, again, sent, readout, logits.shape[-1])
        return sampled.read(readout.send().fetch())

    def _wishes(self, row: SampledRow) -> Wishes:
        sampling = row.sampling
        barred: tuple[int, ...] = ()
        if row.token_index < sampling.stops.min_new_tokens:
            barred = sampling.stops.stop_token_ids + (() if sampling.stops.ignore_eos else self._eos_token_ids)
        return Wishes(sampling.params, barred, row.permitted, row.history)


def _uniforms(rows: Sequence[SampledRow]) -> list[float]:
    """A number for each row; where nobody draws, none."""
    if all(row.sampling.draw.way is Way.LIKELIEST for row in rows):
        return []
    seeds = np.array([row.sampling.mixed_seed for row in rows], np.uint64)
    numbers: list[float] = uniforms(seeds, [row.token_index for row in rows]).tolist()
    return numbers
