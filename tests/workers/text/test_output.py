"""The text side of a request: how answers end, and what is given out and counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.workers.api import FinishReason, GenerationTask, SamplingParams, StopParams
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.text.detokenizer import Vocabulary
from ottserve.workers.text.output import Delta, OutputStream


def task(stop: tuple[str, ...] = (), include: bool = False, skip: bool = True) -> GenerationTask:
    stops = StopParams(max_new_tokens=100, stop=stop, include_stop_text=include)
    return GenerationTask("r", (1,), SamplingParams(), stops, received_at=0.0, skip_special_tokens=skip)


def run(stream: OutputStream, ids: list[int], last: FinishReason | None) -> list[Delta]:
    """Push all ids, the last with `last`, until the stream says that the answer has ended."""
    out = []
    for n, token_id in enumerate(ids, start=1):
        out.append(stream.push(TokenEvent("r", token_id, last if n == len(ids) else None)))
        if out[-1].finish is not None:
            break
    return out


def ids_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.encode(text).ids


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """End and string of the match that ends first, the longest of those that end together."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


@given(data=st.data(), include=st.booleans(), skip=st.booleans())
def test_concatenation_is_the_full_decode_up_to_the_first_stop(
    vocabulary: Vocabulary, data: st.DataObject, include: bool, skip: bool
) -> None:
    """Random tokens with stops drawn from their own text, so that they cross tokens, characters and special tokens."""
    ids = data.draw(st.lists(st.integers(0, vocabulary.tokenizer.get_vocab_size() - 1), min_size=1, max_size=25))
    full = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
    cuts = st.tuples(st.integers(0, max(0, len(full) - 1)), st.integers(1, 6))
    drawn = data.draw(st.lists(cuts.map(lambda cut: full[cut[0] : cut[0] + cut[1]]), max_size=3))
    stops = tuple(stop for stop in drawn if stop)

    deltas = run(OutputStream(vocabulary, task(stops, include, skip)), ids, FinishReason.LENGTH)
    text = "".join(delta.text for delta in deltas)
    match = first_stop(full, stops)
    if match is None:
        assert (text, deltas[-1].finish, deltas[-1].matched_stop) == (full, FinishReason.LENGTH, None)
        assert [i for delta in deltas for i in delta.token_ids] == ids
    else:
        end, stop = match
        assert text == full[: end if include else end - len(stop)]
        assert (deltas[-1].finish, deltas[-1].matched_stop) == (FinishReason.STOP_STRING, stop)
    assert all(delta.finish is None for delta in deltas[:-1])


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop(byte_level_vocabulary: Vocabulary) -> None:
    ids = ids_of(byte_level_vocabulary, "the end of the stream")
    stream = OutputStream(byte_level_vocabulary, task(("end",)))
    deltas = run(stream, ids, FinishReason.LENGTH)
    so_far = byte_level_vocabulary.decode(ids[: len(deltas)])
    assert "end" in so_far and "end" not in byte_level_vocabulary.decode(ids[: len(deltas) - 1])
    assert stream.num_completion_tokens == len(deltas) < len(ids)
    assert "".join(delta.text for delta in deltas) == "the "


def test_the_engine_is_told_of_a_stop_only_if_it_does_not_know_of_the_end(byte_level_vocabulary: Vocabulary) -> None:
    token_id = byte_level_vocabulary.tokenizer.token_to_id("b")
    running, last = (OutputStream(byte_level_vocabulary, task(("b",))) for _ in range(2))
    assert running.push(TokenEvent("r", token_id)).must_stop
    delta = last.push(TokenEvent("r", token_id, FinishReason.LENGTH))
    assert (delta.finish, delta.must_stop) == (FinishReason.STOP_STRING, False)


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a</s>")])
def test_eos_shows_only_when_special_tokens_do(byte_level_vocabulary: Vocabulary, skip: bool, text: str) -> None:
    ids = [byte_level_vocabulary.tokenizer.token_to_id(token) for token in ("a", "</s>")]
    stream = OutputStream(byte_level_vocabulary, task(skip=skip))
    deltas = run(stream, ids, FinishReason.EOS)
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].finish is FinishReason.EOS
    assert deltas[-1].token_ids == (ids[-1],) and stream.num_completion_tokens == 2


def test_eos_that_the_tokenizer_does_not_call_special_is_left_out_too(byte_level_vocabulary: Vocabulary) -> None:
    ids = [byte_level_vocabulary.tokenizer.token_to_id(token) for token in ("a", "b")]
    deltas = run(OutputStream(byte_level_vocabulary, task()), ids, FinishReason.EOS)
    assert "".join(delta.text for delta in deltas) == "a"


@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.LENGTH, FinishReason.ABORTED])
def test_nothing_is_withheld_at_the_end(byte_level_vocabulary: Vocabulary, finish: FinishReason) -> None:
    """Text that began like a stop comes out however the answer ends."""
    stream = OutputStream(byte_level_vocabulary, task(("</end>",)))
    ids = ids_of(byte_level_vocabulary, "a <")
    eos = byte_level_vocabulary.tokenizer.token_to_id("</s>")
    if finish is FinishReason.ABORTED:
        deltas = [*run(stream, ids, None), stream.close(finish)]
    else:
        deltas = run(stream, [*ids, eos] if finish is FinishReason.EOS else ids, finish)
    assert "".join(delta.text for delta in deltas) == "a <"
    assert deltas[-1].finish is finish


def test_an_incomplete_character_comes_out_at_an_abort(byte_level_vocabulary: Vocabulary) -> None:
    stream = OutputStream(byte_level_vocabulary, task())
    assert stream.push(TokenEvent("r", byte_level_vocabulary.tokenizer.token_to_id("Ã"))).text == ""
    assert stream.close(FinishReason.ABORTED).text == "\ufffd"


def test_a_stop_string_within_the_first_tokens_is_text(byte_level_vocabulary: Vocabulary) -> None:
    ids = [token_id for letter in "xyxyz" for token_id in ids_of(byte_level_vocabulary, letter)]
    stops = StopParams(max_new_tokens=9, stop=("xy",), min_new_tokens=3)
    stream = OutputStream(byte_level_vocabulary, GenerationTask("r", (1,), SamplingParams(), stops, 0.0))
    deltas = run(stream, ids, FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "xy"
    assert (deltas[-1].finish, len(deltas)) == (FinishReason.STOP_STRING, 4)


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xy")])
def test_a_stop_token_is_shown_as_a_stop_string_would_be(
    byte_level_vocabulary: Vocabulary, include: bool, text: str
) -> None:
    ids = [token_id for letter in "xy" for token_id in ids_of(byte_level_vocabulary, letter)]
    deltas = run(OutputStream(byte_level_vocabulary, task(include=include)), ids, FinishReason.STOP_TOKEN)
    assert "".join(delta.text for delta in deltas) == text
    assert (deltas[-1].finish, deltas[-1].token_ids) == (FinishReason.STOP_TOKEN, (ids[1],))
