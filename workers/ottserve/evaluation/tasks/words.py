"""Text to token ids for tasks that mean one part of a text: an answer at its end. Knows no model but its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as token ids, and the answer that it is about."""

    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class Words:
    """The tokenizer of a model."""

    def __init__(self, model: LoadedModel) -> None:
        self._tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
        self._files = model.tokenizer

    def begin(self, text: str) -> tuple[int, ...]:
        """The token ids of a text from its first token on, with what the tokenizer puts before and behind it."""
        return tuple(self._tokenizer.encode(text).ids)

    def go_on(self, text: str) -> tuple[int, ...]:
        """The token ids of a text that follows another."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def ask(self, question: str, answer: str) -> Asked:
        """Question and answer, tokenised as one text that follows another, and cut where the answer begins.

        Where a token has both the end of the question and the beginning of the answer, it counts as the answer's.
        """
        found = self._tokenizer.encode(question + answer, add_special_tokens=False)
        first = next(index for index, (_, end) in enumerate(found.offsets) if end > len(question))
        return Asked(tuple(found.ids[:first]), tuple(found.ids[first:]))

    def chat(self, rules: str, question: str) -> tuple[int, ...]:
        """The token ids of a system message and a first question, by the model's own template.

        Raises:
            ValueError: the model has no chat template.
        """
        if self._files.chat_template is None:
            raise ValueError("the model has no chat template")
        renderer = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, **self._files.special_tokens)
        text = renderer.apply_chat_template(
            [{"role": "system", "content": rules}, {"role": "user", "content": question}],
            chat_template=self._files.chat_template,
            add_generation_prompt=True,
            tokenize=False,
        )
        return self.go_on(text)
