"""Replayed steps and kernels compiled ahead, without a GPU: what is captured here is computed anew when replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.ahead import attend_once
from ottserve.evaluation.attention import AttentionErrors
from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.replay import Replay, Replayed
from ottserve.evaluation.stream import TextStream
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel

SMALL_PAGES = "group=32,window=16"


class Captures:
    """Counts how often each capture was replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, compute: Replay) -> Replay:
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> Tensor:
            self.replays[number] += 1
            return compute()

        return replay


def read(
    model: LoadedModel, name: str, token_ids: tuple[int, ...], captures: Captures | None = None
) -> tuple[Tensor, AttentionErrors]:
    """Logits of a text cut at every 32 tokens, and what attention lost."""
    stream = TextStream(model, parse_policy(name).cache, len(token_ids), watched=True)
    if captures is not None:
        stream._run = Replayed(stream._run, stream.spec.sealed_pages(len(token_ids)), captures)
    finest = resolve_spec(parse_policy(f"kivi:{SMALL_PAGES}").cache, model.shape)
    cuts = pieces([finest, stream.spec], len(token_ids))
    logits = torch.cat([stream.advance(token_ids[cut.start : cut.stop]) for cut in cuts])
    errors = stream.attention_errors
    assert errors is not None
    return logits, errors


@pytest.mark.parametrize(
    ("name", "replays"),
    [(f"ott:{SMALL_PAGES}", [6]), ("ott:preset=smallest,group=64,window=16", [2, 2]), (f"fp16:{SMALL_PAGES}", [6])],
)
def test_replayed_steps_give_what_others_give(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], name: str, replays: list[int]
) -> None:
    captures = Captures()
    plain, replayed = read(tiny_model, name, token_ids), read(tiny_model, name, token_ids, captures)
    assert captures.replays == replays
    assert torch.equal(plain[0], replayed[0])
    for errors, others in zip(plain[1].output + plain[1].scores, replayed[1].output + replayed[1].scores, strict=True):
        assert errors == pytest.approx(others, rel=1e-4)


def test_results_of_a_shape_stay_apart(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    stream = TextStream(tiny_model, parse_policy(f"ott:{SMALL_PAGES}").cache, 300)
    stream._run = Replayed(stream._run, 8, Captures())
    found = [stream.advance(token_ids[start : start + 4]) for start in range(0, 40, 4)]
    assert len({part.sum().item() for part in found}) == 10


@pytest.mark.parametrize("name", ["ott:preset=accurate", "kivi:keys=pre_rope", "fp16"])
def test_what_runs_ahead_fills_two_pages(tiny_model: LoadedModel, name: str) -> None:
    spec = resolve_spec(parse_policy(name).cache, tiny_model.shape)
    store = attend_once(spec, 4, torch.float32, torch.float16, torch.device("cpu"))
    for run in store.runs:
        assert run.pages[:, 1:].flatten(2).any(2).all()
        assert not run.pages[:, 0].any()
