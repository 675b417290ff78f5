"""Small real tokenizers of the two families that language models use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ottserve.workers.text.detokenizer import Vocabulary

SENTENCES = ["Grüße aus Köln, 東京 and 😀😀", "the end of the stream </end> of \ufffd text"]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3, Qwen and SmolLM: tokens are any bytes, so characters are split over them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens([AddedToken("Ünı", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Whole characters with bytes as fallback, as in Llama 2, Mistral and Gemma; a space is dropped at the start."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *SPECIAL, *bytes_, "▁", "▁the", "a", "b", "é", "\ufffd", "▁▁", "あ"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="session", params=FAMILIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    """The vocabulary of each family in turn."""
    return Vocabulary.of(FAMILIES[request.param]())


@pytest.fixture(scope="session")
def byte_level_vocabulary() -> Vocabulary:
    """The vocabulary of byte-level BPE alone."""
    return Vocabulary.of(byte_level())
