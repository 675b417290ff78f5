"""Text to token ids and back, off the event loop, with `tokenizers` alone. Knows no request and no model weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tokenizers

from ottserve.service.chat_template import ChatTemplate
from ottserve.service.token_bytes import TokenBytes
from ottserve.workers.api import TokenizerFiles, invalid


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids and the text they stand for."""

    text: str
    ids: tuple[int, ...]


class Tokenizer:
    """The tokenizer of one model. `tokenizers` lets go of the interpreter while it works, so threads help.

    Attributes:
        bytes: what single tokens stand for.
    """

    def __init__(self, files: TokenizerFiles, executor: ThreadPoolExecutor) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self._executor = executor
        self.bytes = TokenBytes(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether a chat can be tokenised."""
        return self._template is not None

    async def encode(self, text: str, add_special_tokens: bool = True) -> TokenizedText:
        """The token ids of a text, by default with those the model puts around it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> TokenizedText:
        """The token ids of a chat; the template writes the special tokens. Raises InvalidField."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._encode_chat, messages, add_generation_prompt
        )

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, each within the vocabulary."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._decode, token_ids, skip_special_tokens
        )

    def _encode(self, text: str, add_special_tokens: bool) -> TokenizedText:
        return TokenizedText(text, tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids))

    def _encode_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> TokenizedText:
        if self._template is None:
            raise invalid(
                "chat", f"{len(messages)} messages", "text or token_ids, since the model has no chat template"
            )
        return self._encode(self._template.render(messages, add_generation_prompt), add_special_tokens=False)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
