"""The tensors of one step as the cache reads them. Built by `engine/inputs.py`; holds no decision.

Everything is on the cache's device; ids, positions and counts are int32 unless said otherwise. N decode rows, T tokens
and B page-table columns are letters of kernels/README.md. Unlike there, M are prompt chunks, K what they list (pages or
tokens), S rows whose logits choose a token, and F slots whose sequence begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NO_PAGE = -1
"""The id of a page that a chunk would fill, in padding."""


@dataclass(frozen=True, slots=True)
class SealBatch:
    """Groups of tails to seal in one layer: slot, page and position of the first token, int32 `[K]` each."""

    slot_ids: Tensor
    page_ids: Tensor
    first_positions: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token each of N sequences.

    Attributes:
        slot_ids, positions: int32 `[N]`, where the new token is written.
        page_table: int32 `[N, B]`; row n holds `num_pages[n]` page ids, the rest is never read.
        num_pages: int32 `[N]`, sealed pages before the step.
        lengths: int32 `[N]`, tokens stored once the new token is written.
    """

    slot_ids: Tensor
    positions: Tensor
    page_table: Tensor
    num_pages: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """The K pages that chunks fill, chunk by chunk, oldest first.

    Attributes:
        starts: int32 `[M+1]`; chunk n fills pages starts[n] … starts[n+1]−1 of the K.
        rows, page_ids, first_positions: int32 `[K]`: number of the chunk, id (or `NO_PAGE`), position of the group's
            first token.
    """

    starts: Tensor
    rows: Tensor
    page_ids: Tensor
    first_positions: Tensor


@dataclass(frozen=True, slots=True)
class TailTokens:
    """Tokens of chunks that go to the tails: which of the chunk tokens, and where to.

    Attributes:
        rows: int64 `[K]`, since keys and values are indexed by it in every layer: torch turns shorter ones into these.
        slot_ids, positions: int32 `[K]`.
    """

    rows: Tensor
    slot_ids: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """One prompt chunk each of M sequences, flattened after the decode rows.

    Attributes:
        starts: int32 `[M+1]`, where each chunk begins among the chunk tokens.
        page_table, num_pages, slot_ids: as for decode rows, `[M, B]`, `[M]`, `[M]`.
        lengths: int32 `[M]`, tokens stored before the chunk.
        pages: what the chunks fill once they have been attended to; the groups come from tails and chunks.
        tail: what of the chunks is in no page then, and is written when the pages are sealed.
    """

    starts: Tensor
    page_table: Tensor
    num_pages: Tensor
    slot_ids: Tensor
    lengths: Tensor
    pages: ChunkPages | None
    tail: TailTokens


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step: N decode rows first, then the tokens of all chunks.

    Attributes:
        token_ids, position_ids: int64 `[1, T]`, as transformers takes them.
        fresh_slots: int64 `[F]`, slots whose sequence begins in this step.
        sampled_rows: int64 `[S]`, the rows whose logits choose a token, decode rows first.
        decode_seal: tails that the decode rows fill; sealed in all layers when the forward pass has ended.
    """

    token_ids: Tensor
    position_ids: Tensor
    num_decodes: int
    fresh_slots: Tensor | None
    sampled_rows: Tensor
    decodes: DecodeRows | None
    chunks: Chunks | None
    decode_seal: SealBatch | None
