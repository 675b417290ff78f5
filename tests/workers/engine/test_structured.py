"""Answers of a given form: what they are, what is refused, and that nobody else notices."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ottserve.workers.api import (
    Choice,
    FinishReason,
    Grammar,
    Internal,
    InvalidField,
    JsonSchema,
    QueueFull,
    Regex,
    TextChunk,
)
from ottserve.workers.engine import compute, forms, structured
from ottserve.workers.engine.structured import FormCompiler, FormFollower
from ottserve.workers.models.toy import SIGNS, toy_tokenizer

CHARACTERS = [chr(code) for code in range(32, 127)]
EOS = len(CHARACTERS)


def ascii_tokenizer() -> str:
    """A token a printable ASCII character, then <eos> and <other>, which are no text."""
    tokenizer = Tokenizer(models.WordLevel({sign: i for i, sign in enumerate(CHARACTERS)}, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", "<other>"])
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def compiler():
    return FormCompiler(ascii_tokenizer(), vocab_size=EOS + 9, eos_token_ids=(EOS,))


def compiled(compiler, form):
    compilation = compiler.compile(form)
    while not compilation.is_settled:
        time.sleep(0.001)
    return compilation.follower()


def bits_of(permitted):
    """The token ids whose bits are set, rising."""
    return [32 * i + bit for i, word in enumerate(permitted.tolist()) for bit in range(32) if word >> bit & 1]


def walk(follower, pick, max_tokens=400):
    """The text of one way through a form, None if it has no end within `max_tokens`."""
    text = ""
    for _ in range(max_tokens):
        allowed = bits_of(follower.permitted(math.inf))
        assert set(allowed) <= set(range(EOS + 1)), "no special token and none beyond the tokenizer"
        token_id = pick(allowed)
        if token_id == EOS:
            return text
        text += CHARACTERS[token_id]
        follower.advance(token_id)
    return None


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": {"k": [1]}}], "items": {"type": "null"}, "maxItems": 2},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "null"}}},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": ["integer", "null"]},
    {"type": "number", "exclusiveMinimum": 1, "maximum": 2.5},
    {"allOf": [{"type": "object", "properties": {"z": {"enum": [1, 2], "type": "integer"}}, "required": ["z"]}]},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"type": "object"},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#/prefixItems/0"}, "maxItems": 2},
    {"$ref": "#/definitions/l", "definitions": {"l": {"type": "array", "items": {"$ref": "#/definitions/l"}}}},
    {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
    {"$ref": "#/$defs/a~1b~0%20%25", "$defs": {"a/b~ %": {"const": 1}, "a~1b~0%20%25": {"const": 2}}},
    {},
    True,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@settings(max_examples=15, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_every_way_through_a_schema_is_accepted_by_it(compiler, schema, random):
    def pick(allowed):
        return EOS if EOS in allowed and random.random() < 0.7 else random.choice(allowed)

    text = walk(compiled(compiler, JsonSchema(json.dumps(schema))), pick)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@given(options=st.lists(st.text('ab"\\{}| ', min_size=1, max_size=5), min_size=1, max_size=4), random=st.randoms())
@settings(max_examples=50, deadline=None)
def test_a_choice_is_one_of_its_options_letter_by_letter(compiler, options, random):
    assert walk(compiled(compiler, Choice(tuple(options))), random.choice) in options


@pytest.mark.parametrize(
    ("form", "field", "limit"),
    [
        (JsonSchema('{"type": "object"'), "json_schema", "a JSON document"),
        (JsonSchema("[]"), "json_schema", "a JSON schema"),
        (JsonSchema('{"type": "nope"}'), "json_schema", "not valid"),
        (JsonSchema('{"type": "object", "properties": [1]}'), "json_schema", "not of type 'object'"),
        (JsonSchema('{"items": ' * 6000 + "{}" + "}" * 6000), "json_schema", "within each other"),
        (JsonSchema('{"anyOf": [' * 70 + "{}" + "]}" * 70), "json_schema", "at most 64 schemas within each other"),
        (JsonSchema('{"not": {"type": "string"}}'), "json_schema", "not beside"),
        (JsonSchema('{"type": "array", "uniqueItems": true}'), "json_schema", "uniqueItems beside"),
        (JsonSchema('{"type": "object", "required": ["z"]}'), "json_schema", "'z' has none"),
        (JsonSchema('{"properties": {"a": {}}}'), "json_schema", "properties beside"),
        (JsonSchema('{"allOf": [{}, {}]}'), "json_schema", "allOf of one schema"),
        (JsonSchema('{"type": "integer", "enum": ["a"]}'), "json_schema", "values that are of the type"),
        (JsonSchema('{"type": "string", "pattern": "a", "maxLength": 3}'), "json_schema", "one of pattern"),
        (JsonSchema('{"type": "string", "format": "colour"}'), "json_schema", "a format of"),
        (JsonSchema('{"$ref": "#/nowhere"}'), "json_schema", "nowhere"),
        (JsonSchema('{"$ref": "#"}'), "json_schema", "Circular"),
        (JsonSchema('{"$ref": "http://x/y.json"}'), "json_schema", "'http://x/y.json at /'"),
        (JsonSchema('{"items": {"$ref": "item.json"}, "type": "array"}'), "json_schema", "'item.json at /items'"),
        (JsonSchema('{"$ref": ""}'), "json_schema", "a $ref that is #"),
        (JsonSchema('{"$id": "http://x/y", "$ref": "http://x/y#/$defs/d", "$defs": {"d": {}}}'), "json_schema", "#/$"),
        (JsonSchema('{"$ref": "#d", "$defs": {"d": {}}}'), "json_schema", "'#d at /'"),
        (JsonSchema('{"$ref": "#/$defs", "$defs": {"d": {}}}'), "json_schema", "points to a schema"),
        (JsonSchema('{"$ref": "#/$defs/a/b", "$defs": {"a/b": {}}}'), "json_schema", "points to a schema"),
        (JsonSchema('{"$ref": "#/$defs/a~b", "$defs": {"a~b": {}}}'), "json_schema", "points to a schema"),
        (JsonSchema('{"$ref": "#/$defs/a%7E1b", "$defs": {"a~1b": {}}}'), "json_schema", "points to a schema"),
        (JsonSchema('{"$ref": "#/default", "default": {"not": {}}}'), "json_schema", "'#/default at /'"),
        (JsonSchema('{"$ref": "#/examples/0", "examples": [{"not": {}}]}'), "json_schema", "that is looked at"),
        (JsonSchema('{"$defs": {"d": {"$id": "d", "items": {"$ref": "#"}, "type": "array"}}}'), "json_schema", "$id"),
        (JsonSchema("false"), "json_schema", "cannot accept any value"),
        (Regex("(a"), "regex", "parenthesis"),
        (Regex(r"(a)\1"), "regex", "Backreference"),
        (Grammar("root ::="), "grammar", "Expect element"),
        (Grammar('start ::= "a"'), "grammar", "root"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_name(compiler, form, field, limit):
    with pytest.raises(InvalidField) as refused:
        compiled(compiler, form)
    assert refused.value.field == f"structured_output.{field}"
    assert limit in refused.value.message
    assert ".cc" not in refused.value.message


@pytest.mark.parametrize("form", [Regex("[^ -~]"), Grammar("root ::= root"), Choice(("é",))])
def test_a_form_that_the_vocabulary_cannot_write_is_refused(compiler, form):
    with pytest.raises(InvalidField, match="vocabulary"):
        compiled(compiler, form).permitted(math.inf)


def test_nested_quantifiers_are_followed_or_given_up_never_let_go(compiler):
    """Whatever it costs to follow them, all text is of the form, and the waiting is bounded."""
    follower = compiled(compiler, Regex("((a{1,1000}){1,1000}){1,1000}"))
    began = time.monotonic()
    a = CHARACTERS.index("a")
    with pytest.raises(InvalidField, match="pace"):
        for _ in range(10_000):
            assert set(bits_of(follower.permitted(math.inf))) <= {a, EOS}
            follower.advance(a)
    assert time.monotonic() - began < 20


@pytest.fixture
def stalled(monkeypatch):
    """Once set, following any form stalls until the end of the test."""
    stalled, over, permit = threading.Event(), threading.Event(), FormFollower._permit

    def stall(self):
        if stalled.is_set():
            over.wait()
        return permit(self)

    monkeypatch.setattr(FormFollower, "_permit", stall)
    yield stalled
    over.set()


def test_no_number_of_quick_tokens_pays_for_a_long_wait(compiler, stalled, monkeypatch):
    monkeypatch.setattr(structured, "WAIT_PER_TOKEN_S", 2.0)
    follower = compiled(compiler, Regex("a*"))
    for _ in range(3):
        follower.permitted(math.inf)
        follower.advance(CHARACTERS.index("a"))
    follower.permitted(math.inf)
    stalled.set()
    follower.advance(CHARACTERS.index("a"))
    began = time.monotonic()
    with pytest.raises(InvalidField, match="pace"):
        follower.permitted(math.inf)
    assert time.monotonic() - began < 1.5


@pytest.fixture
def ask(make_task):
    """Makes tasks whose prompt is "a"."""

    def make(form, request_id="r", max_new=50, **more):
        return replace(make_task("a", request_id=request_id, max_new=max_new), form=form, **more)

    return make


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(Choice(("cab", "cad")), "cab", id="choice, b follows a and d is two further"),
        pytest.param(Regex("[xyz]{2}!"), "xy!", id="regex, x is the first of three as likely"),
        pytest.param(Grammar('root ::= "no" | "n" root'), "no", id="grammar, o follows n"),
        pytest.param(JsonSchema('{"type": "boolean"}'), "false", id="schema, f is the first of those as likely"),
    ],
)
def test_the_toy_answers_in_the_form(make_engine, ask, run_to_end, form, text):
    answers = run_to_end(make_engine(), ask(form))
    assert answers.reason("r") is FinishReason.EOS
    assert answers.text["r"] == text


def test_each_of_n_samples_follows_the_form_by_itself(make_engine, ask):
    engine = make_engine()
    task = ask(Regex("[a-z]{5}"), n=4)
    engine.add(replace(task, sampling=replace(task.sampling, temperature=50.0, seed=3)))
    text = ["", "", "", ""]
    while engine.has_work:
        for _, chunk in engine.step():
            text[chunk.index] += chunk.text
    assert all(len(each) == 5 and each.isalpha() for each in text)
    assert len(set(text)) == 4


def test_a_bad_form_ends_its_own_request_and_no_other(make_engine, ask, make_task, run_to_end):
    tasks = [
        ask(JsonSchema('{"type": "nope"}'), request_id="malformed"),
        ask(Choice(("#",)), request_id="unwritable"),
        make_task("a", request_id="fine", max_new=3),
        ask(Choice(("bca",)), request_id="formed"),
    ]
    answers = run_to_end(make_engine(), *tasks)
    assert isinstance(answers.ends["malformed"], InvalidField)
    assert isinstance(answers.ends["unwritable"], InvalidField)
    assert "unwritable" not in answers.text
    assert (answers.text["fine"], answers.text["formed"]) == ("bcd", "bca")


def test_forms_that_broke_others_end_in_time_and_disturb_nobody(make_engine, ask, make_task):
    """A regex of nested quantifiers, a malformed schema, one without properties: the form, or an error, within 5 s."""
    engine, began, took_s, texts, ends = make_engine(max_running=8), time.monotonic(), {}, {}, {}
    nested = Regex("(((a|b){1,1000}){1,1000}){1,1000}c")
    for task in (
        ask(nested, request_id="nested", max_new=30),
        ask(JsonSchema('{"type": "object", "properties": {"a": '), request_id="malformed"),
        ask(JsonSchema('{"type": "object"}'), request_id="bare"),
        make_task("a", request_id="fine", max_new=20),
    ):
        engine.add(task)
    while engine.has_work:
        for request_id, event in engine.step():
            took_s[request_id] = time.monotonic() - began
            if isinstance(event, TextChunk):
                texts[request_id] = texts.get(request_id, "") + event.text
            if not isinstance(event, TextChunk) or event.finish:
                ends[request_id] = event
    assert max(took_s.values()) < 5
    assert isinstance(ends["malformed"], InvalidField) and "malformed" not in texts
    assert set(texts.get("nested", "")) <= set("abc")
    assert isinstance(ends["bare"], InvalidField) or texts["bare"].lstrip().startswith("{")
    assert texts["fine"] == "bcdefghijklmnopqrstu"


def test_however_many_answers_are_slow_to_follow_a_step_waits_once(make_engine, ask, make_task, stalled):
    engine, text, ends, slow = make_engine(max_running=9), {}, {}, "rstuvw"
    for name in slow:
        engine.add(ask(Regex("[a-z]{40}"), request_id=name, n=2 if name == "r" else 1))

    def step():
        for request_id, event in engine.step():
            if isinstance(event, TextChunk):
                text[request_id] = text.get(request_id, "") + event.text
            if not isinstance(event, TextChunk) or event.finish:
                ends[request_id] = event

    while len(text) < len(slow):
        step()
    engine.add(make_task("a", request_id="fine", max_new=3))
    stalled.set()
    began = time.monotonic()
    while engine.has_work:
        step()
    assert time.monotonic() - began < 2, "six waits would be more"
    told = [(type(ends[name]), "pace" if "pace" in str(ends[name]) else "no time") for name in slow]
    assert set(told) == {(InvalidField, "pace"), (Internal, "no time")}
    assert told.count((InvalidField, "pace")) <= structured.NUM_THREADS, "only work that has begun is slow"
    assert text["fine"] == "bcd"


def test_a_request_that_has_failed_is_not_waited_for(make_engine, ask, run_to_end, stalled, monkeypatch):
    """The form of the first sample fails at once, while that of the second stalls."""
    stall, calls = FormFollower._permit, itertools.count()

    def fail_first(self):
        if next(calls) == 0:
            raise RuntimeError("a planted fault")
        return stall(self)

    monkeypatch.setattr(FormFollower, "_permit", fail_first)
    for waiting in (structured, compute):
        monkeypatch.setattr(waiting, "MAX_WAIT_S", 30.0)
    stalled.set()
    began = time.monotonic()
    answers = run_to_end(make_engine(), ask(Choice(("b",)), n=2))
    assert time.monotonic() - began < 20
    assert isinstance(answers.ends["r"], Internal)


def test_a_form_that_takes_too_long_to_compile_is_refused_while_others_run(
    make_engine, ask, make_task, run_to_end, monkeypatch
):
    monkeypatch.setattr(structured, "COMPILE_LIMIT_S", 0.2)
    monkeypatch.setattr(FormCompiler, "_compile", lambda self, form: time.sleep(1.0))
    engine = make_engine()
    began = time.monotonic()
    answers = run_to_end(engine, ask(Regex("a"), request_id="slow"), make_task("a", request_id="fine", max_new=3))
    assert time.monotonic() - began < 0.9
    assert isinstance(answers.ends["slow"], InvalidField) and "0.2 s" in str(answers.ends["slow"])
    assert answers.text["fine"] == "bcd"


def test_a_request_can_be_aborted_while_its_form_is_compiled(make_engine, ask, monkeypatch):
    monkeypatch.setattr(FormCompiler, "_compile", lambda self, form: time.sleep(0.3))
    engine = make_engine()
    engine.add(replace(ask(Regex("a")), n=3))
    load = engine.load_report()
    assert engine.has_work and (load.num_waiting, load.num_waiting_samples) == (1, 3)
    assert engine.abort("r") and not engine.abort("r")
    assert {chunk.finish.reason for _, chunk in engine.step()} == {FinishReason.ABORTED}
    assert not engine.has_work


def test_only_so_many_forms_wait_to_be_compiled(make_engine, ask, monkeypatch):
    monkeypatch.setattr(forms, "MAX_COMPILING", 1)
    monkeypatch.setattr(FormCompiler, "_compile", lambda self, form: time.sleep(0.1))
    engine = make_engine()
    engine.add(ask(Regex("a"), request_id="first"))
    with pytest.raises(QueueFull, match="at most 1 may"):
        engine.add(ask(Regex("a"), request_id="second"))


def test_a_model_without_eos_has_no_forms():
    with pytest.raises(InvalidField, match="EOS"):
        compiled(FormCompiler(toy_tokenizer().tokenizer_json, len(SIGNS), ()), Regex("a"))


def test_a_fault_while_a_form_is_followed_ends_its_own_request_alone(
    make_engine, ask, make_task, run_to_end, monkeypatch
):
    def fail(self, token_id):
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(FormFollower, "_accept", fail)
    answers = run_to_end(make_engine(), ask(Choice(("bca",))), make_task("a", request_id="fine", max_new=3))
    assert isinstance(answers.ends["r"], Internal) and "planted" not in str(answers.ends["r"])
    assert answers.text["fine"] == "bcd"
