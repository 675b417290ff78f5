"""What replicas say of one prompt → pieces of its choices. Knows no JSON.

Here the prompt is put before its answers where that is asked for, and a token that nobody asked for is left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from ottserve.workers.api import Finish, FinishReason, GenerationTask, TextChunk, TokenLogprob

Decode = Callable[[tuple[int, ...]], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and how likely it was where something predicts it."""

    token_id: int
    scored: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What has gathered of one choice.

    Attributes:
        tokens: with log probabilities, where they are asked for; else none.
        num_tokens: those that were generated; a prompt's do not count.
    """

    choice: int
    text: str
    tokens: tuple[Token, ...]
    num_tokens: int = 0
    finish: Finish | None = None

    def __bool__(self) -> bool:
        """Whether it tells anything."""
        return bool(self.text or self.tokens or self.finish)


class PromptAnswers:
    """The choices that one prompt of a call gets.

    Attributes:
        choices: numbers of its choices among those of the call.
        task: once it is accepted.
    """

    def __init__(self, choices: range, echo: Decode | None = None, is_score: bool = False) -> None:
        """
        Args:
            choices: a number for each sample.
            echo: turns the prompt into the text that stands before each answer; None for none.
            is_score: nothing but the prompt is asked for.
        """
        self.task: GenerationTask | None = None
        self.choices = choices
        self._echo = echo
        self._is_score = is_score

    def accept(self, task: GenerationTask) -> None:
        """The request has become a task."""
        self.task = task

    async def pieces(self, chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[Piece, None]:
        """Pieces of every choice, the last of each with its finish."""
        prompt: list[TokenLogprob | None] = []
        echo = self._echo
        async with aclosing(chunks):
            async for chunk in chunks:
                prompt += chunk.prompt_logprobs
                if echo is not None and self.task is not None and (chunk.token_ids or chunk.finish):
                    for piece in self._prompt(self.task, await echo(self.task.prompt_ids), prompt):
                        yield piece
                    echo = None
                if piece := self._piece(chunk):
                    yield piece

    def _prompt(self, task: GenerationTask, text: str, scored: list[TokenLogprob | None]) -> Iterator[Piece]:
        tokens = tuple(map(Token, task.prompt_ids, scored))
        for choice in self.choices:
            yield Piece(choice, text, tokens)

    def _piece(self, chunk: TextChunk) -> Piece:
        choice, finish = self.choices[chunk.index], chunk.finish
        if self._is_score:
            return Piece(choice, "", (), 0, finish and _without_answer(finish))
        tokens = tuple(Token(scored.token_id, scored) for scored in chunk.logprobs)
        return Piece(choice, chunk.text, tokens, len(chunk.token_ids), finish)


def _without_answer(finish: Finish) -> Finish:
    return replace(finish, reason=FinishReason.LENGTH, usage=replace(finish.usage, num_completion_tokens=0))
