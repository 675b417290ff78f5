"""Answers of a given form: grammars compiled beside the engine's thread, and what each permits next.

All work of xgrammar's is done on threads of this file, under time limits, and fails closed: a form that can't be
compiled or followed ends its request with an error, never with unconstrained text. Knows no sequence and no logits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import structlog
import xgrammar
from tokenizers import Tokenizer
from torch import Tensor

from ottserve.workers.api import Choice, Form, Grammar, Internal, InvalidField, JsonSchema, Regex, invalid
from ottserve.workers.engine.json_schema import refuse_inexact

log = structlog.get_logger(__name__)

COMPILE_LIMIT_S = 5.0
MAX_WAIT_S = 0.5  # of a step for all its forms together; also what a follower has to spend at most
WAIT_PER_TOKEN_S = 0.005
CACHE_BYTES = 64 << 20
NUM_THREADS = 2
MAX_WHITESPACE = 16  # between two tokens of JSON; without a bound, a weak model may never come to an end

_ORIGIN = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # what xgrammar puts before its messages: a time, and a file of its own

FIELDS: dict[type[Form], str] = {
    JsonSchema: "structured_output.json_schema",
    Regex: "structured_output.regex",
    Choice: "structured_output.choice",
    Grammar: "structured_output.grammar",
}


class FormCompiler:
    """Compiles forms for one model's vocabulary. Equal forms are compiled once."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: width of the model's logits, which may exceed the tokenizer's own."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiling = ThreadPoolExecutor(NUM_THREADS, "compile-form")
        self._following = ThreadPoolExecutor(NUM_THREADS, "follow-form")

    def compile(self, form: Form) -> Compilation:
        """Begin to compile; returns at once."""
        return Compilation(FIELDS[type(form)], self._compiling.submit(self._compile, form), self._begin)

    def close(self) -> None:
        """Begin no more work."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._following.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        vocabulary = read_vocabulary(self._tokenizer_json, self._vocab_size, self._eos_token_ids)
        return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def _compile(self, form: Form) -> xgrammar.CompiledGrammar:
        if not self._eos_token_ids:
            raise invalid(FIELDS[type(form)], "set", "a model with an EOS token, by which the form can end")
        match form:
            case JsonSchema(schema):
                refuse_inexact(schema)
                return self._compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
            case Regex(pattern):
                return self._compiler.compile_regex(pattern)
            case Choice(options):
                return self._compiler.compile_grammar(f"root ::= {' | '.join(map(_literal, options))}")
            case Grammar(ebnf):
                return self._compiler.compile_grammar(ebnf)

    def _begin(self, field: str, compiled: xgrammar.CompiledGrammar) -> FormFollower:
        return FormFollower(field, compiled, self._vocab_size, self._following)


class Compilation:
    """A form that is being compiled, and its followers once it is."""

    def __init__(
        self,
        field: str,
        work: Future[xgrammar.CompiledGrammar],
        begin: Callable[[str, xgrammar.CompiledGrammar], FormFollower],
    ) -> None:
        self.work = work
        self._field = field
        self._begin = begin
        self._deadline = time.monotonic() + COMPILE_LIMIT_S

    @property
    def is_settled(self) -> bool:
        """Whether `result` returns at once: it is compiled, refused, or late."""
        return self.work.done() or time.monotonic() >= self._deadline

    def follower(self) -> FormFollower:
        """A new answer of this form.

        Raises:
            InvalidField: the form is malformed, or took longer to compile than `COMPILE_LIMIT_S`.
            Internal: compiling it failed in a way that is our fault.
        """
        if not self.work.done():
            self.work.cancel()
            raise invalid(self._field, "a longer one", f"a form that compiles within {COMPILE_LIMIT_S:g} s")
        try:
            return self._begin(self._field, self.work.result())
        except InvalidField:
            raise
        except (RuntimeError, ValueError) as error:
            raise invalid(self._field, "malformed", _ORIGIN.sub("", str(error)).strip()[:300]) from error
        except Exception as error:
            log.exception("form_not_compiled", field=self._field)
            raise Internal("the form of the answer could not be compiled", "form_failed") from error


class FormFollower:
    """One answer on its way along its form.

    What may come next is worked out while the engine computes. Waiting for it is paid from a small allowance, which
    each token refills a little, and ends with the step's own. So a form that is slow to follow, such as one of nested
    quantifiers, can't hold up the other requests of a step.
    """

    def __init__(
        self, field: str, compiled: xgrammar.CompiledGrammar, vocab_size: int, executor: ThreadPoolExecutor
    ) -> None:
        self._field = field
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = vocab_size
        self._executor = executor
        self._allowance_s = MAX_WAIT_S
        self._next = executor.submit(self._permit)

    def permitted(self, deadline: float) -> Tensor:
        """What may come next, int32 `[⌈V / 32⌉]` on the host: a bit for each token, at least one of them set.

        Args:
            deadline: by `time.monotonic`, until when the step waits for its forms.

        Raises:
            InvalidField: nothing in the vocabulary may, or it took too long to find out.
            Internal: following the form failed, or others' took the threads for too long, which is our fault.
        """
        began = time.monotonic()
        try:
            bits = self._next.result(min(self._allowance_s, deadline - began))
        except TimeoutError as error:
            if self._next.cancel():  # not begun: it is not this form that is slow
                raise Internal("the forms of other requests left this one no time", "form_failed") from error
            raise invalid(
                self._field, "a slower one", "a form that can be followed at the pace of generation"
            ) from error
        except Exception as error:
            log.exception("form_not_followed", field=self._field)
            raise Internal("the form of the answer could not be followed", "form_failed") from error
        self._allowance_s = min(MAX_WAIT_S, self._allowance_s + WAIT_PER_TOKEN_S - (time.monotonic() - began))
        if not bool(bits.any()):
            raise invalid(self._field, "one with a dead end", "a form that the model's vocabulary can write")
        return bits

    def advance(self, token_id: int) -> None:
        """Take the token that was chosen, not one that ended the answer."""
        self._next = self._executor.submit(self._accept, token_id)

    def _accept(self, token_id: int) -> Tensor:
        if not self._matcher.accept_token(token_id):
            raise RuntimeError(f"token {token_id} was chosen, but the form does not permit it")
        return self._permit()

    def _permit(self) -> Tensor:
        bits: Tensor = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        self._matcher.fill_next_token_bitmask(bits)
        num_over = self._vocab_size % 32
        if num_over:  # what lies behind the vocabulary in the last word is no token, whatever the matcher says
            bits[0, -1] &= (1 << num_over) - 1
        return bits[0]


def read_vocabulary(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> xgrammar.TokenizerInfo:
    """The tokens as xgrammar needs them. Special tokens are no text, so no form permits any but EOS at its end."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokens = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = token
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special and token_id < vocab_size:
            tokens[token_id] = ""
    kind = _vocabulary_kind(json.loads(tokenizer_json).get("decoder"))
    return xgrammar.TokenizerInfo(tokens, kind, vocab_size=vocab_size, stop_token_ids=eos_token_ids)


def _vocabulary_kind(decoder: dict[str, object] | None) -> xgrammar.VocabType:
    kinds = json.dumps(decoder)
    if '"ByteLevel"' in kinds:
        return xgrammar.VocabType.BYTE_LEVEL
    return xgrammar.VocabType.BYTE_FALLBACK if '"ByteFallback"' in kinds else xgrammar.VocabType.RAW


def _literal(text: str) -> str:
    """A text as a literal of EBNF."""
    return '"' + "".join(f"\\U{ord(char):08x}" for char in text) + '"'
