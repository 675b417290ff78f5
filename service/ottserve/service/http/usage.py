"""Counts the tokens of a call in OpenAI's words. A prompt counts once, however many samples it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ottserve.service.http.pieces import Piece, PromptAnswers


class UsageCount:
    """Of all prompts of a call.

    Attributes:
        num_completion: tokens of the choices that have ended; text after a stop is not counted.
    """

    def __init__(self, prompts: Sequence[PromptAnswers]) -> None:
        self.num_completion = 0
        self._prompts = prompts
        self._num_generated = 0
        self._num_cached: dict[range, int] = {}

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompts that are accepted."""
        return sum(len(prompt.task.prompt_ids) for prompt in self._prompts if prompt.task)

    def add(self, piece: Piece) -> None:
        """Takes in a piece."""
        self._num_generated += piece.num_tokens
        if piece.finish is not None:
            self.num_completion += piece.finish.usage.num_completion_tokens
            [choices] = (prompt.choices for prompt in self._prompts if piece.choice in prompt.choices)
            self._num_cached[choices] = piece.finish.usage.num_cached_tokens

    def so_far(self) -> dict[str, Any]:
        """While choices go on."""
        return self._json(self._num_generated)

    def in_all(self) -> dict[str, Any]:
        """When all have ended."""
        return self._json(self.num_completion)

    def _json(self, num_completion: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": self.num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
