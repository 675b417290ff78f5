"""A step's logits corrected before anything is chosen. Waits for nothing: what it counts comes with the step's readout.

Runs after the forward pass, captured or not, on the device that has the logits. Knows no plan and no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.engine.dgap.artefact import Artefact
from ottserve.workers.engine.dgap.features import likeliest
from ottserve.workers.engine.dgap.networks import Networks
from ottserve.workers.engine.dgap.recall import recall
from ottserve.workers.engine.dgap.texts import Texts
from ottserve.workers.engine.penalties import History
from ottserve.workers.engine.readout import Fetched, Readout


@dataclass(slots=True)
class CorrectionCounts:
    """What a correction has seen.

    Attributes:
        num_risky_rows, num_safe_rows: rows of logits that were corrected, and that were left as they are.
        duration_s: time of the engine's thread; a GPU's own comes on top.
    """

    num_risky_rows: int = 0
    num_safe_rows: int = 0
    duration_s: float = 0.0


def correct(
    networks: Networks, threshold: float, logits: Tensor, token_ids: Tensor, lengths: Tensor, num_sealed: Tensor
) -> Tensor:
    """Correct the rows at risk, in place; all others stay bit for bit what they are.

    A row is never at risk before its text has a sealed page, since its logits are exact then, nor where logits are no
    numbers.

    Args:
        networks: on the device of the logits.
        threshold: τ.
        logits: `[S, V]`, any float dtype; deltas are rounded to it.
        token_ids, lengths, num_sealed: as of `recall`.

    Returns:
        bool `[S]`, the rows that were corrected.
    """
    top = likeliest(logits, networks.sizes.num_top)
    found = networks.features(top.logprobs)
    is_risky = (networks.risk(found).sigmoid() >= threshold) & (num_sealed > 0)
    recalled = recall(token_ids, lengths, num_sealed, top.token_ids) if networks.sizes.evidence else None
    corrected = (top.logits.float() + networks.deltas(found, top.logprobs, recalled)).to(logits.dtype)
    logits.scatter_(-1, top.token_ids, corrected.where(is_risky.unsqueeze(-1), top.logits))
    return is_risky


class Correction:
    """A trained correction at work.

    Attributes:
        counts: of all steps so far.
    """

    def __init__(self, artefact: Artefact, threshold: float | None, num_slots: int, device: torch.device) -> None:
        """`threshold`: None takes the artefact's own."""
        self.counts = CorrectionCounts()
        self._networks = artefact.networks.to(device)
        self._threshold = artefact.threshold if threshold is None else threshold
        self._texts = Texts(num_slots, device)

    @torch.inference_mode()
    def correct(
        self, logits: Tensor, histories: Sequence[History], num_sealed: Sequence[int], readout: Readout
    ) -> Callable[[Fetched], None]:
        """Correct a step's logits `[S, V]`, in place.

        Args:
            histories: S texts that the rows continue.
            num_sealed: S times, how many of the oldest tokens lie in sealed pages; where none do, nothing is computed.
            readout: takes what has to reach the host.

        Returns:
            A function that counts the rows, from what `readout` fetched.
        """
        began = time.perf_counter()
        if not any(num_sealed):
            self.counts.num_safe_rows += len(num_sealed)
            return lambda fetched: None
        token_ids, lengths = self._texts.of(histories)
        sealed = torch.tensor(num_sealed).to(logits.device, non_blocking=True)
        is_risky = correct(self._networks, self._threshold, logits, token_ids, lengths, sealed)
        place = readout.add(is_risky.sum())
        self.counts.duration_s += time.perf_counter() - began

        def count(fetched: Fetched) -> None:
            num_risky = int(fetched[place])
            self.counts.num_risky_rows += num_risky
            self.counts.num_safe_rows += len(num_sealed) - num_risky

        return count
