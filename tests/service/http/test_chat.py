"""POST /v1/chat/completions through the real client, blocking and with asyncio."""

import asyncio
import contextlib
import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

from ottserve.workers import api

USER = {"role": "user", "content": "hi"}


async def create(surface: Any, **fields: Any) -> Any:
    return await surface.client.chat.completions.create(
        **({"model": "toy", "messages": [USER], "max_completion_tokens": 3} | fields)
    )


async def prompt_of(surface: Any, replicas: Any, *messages: Any, **fields: Any) -> str:
    await create(surface, messages=messages, **fields)
    text: str = await surface.server._readiness.known().tokenizer.decode(replicas.tasks[-1].prompt_ids, False)
    return text


async def test_an_answer_is_a_message(surface: Any) -> None:
    answer = await create(surface, n=2)
    assert answer.object == "chat.completion"
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "assistant", "0 1 2 ", "length"),
        (1, "assistant", "0 1 2 ", "length"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 6)


async def test_a_stream_opens_every_message_and_then_appends(surface: Any) -> None:
    stream = await create(surface, stream=True, n=2, stream_options={"include_usage": True})
    *events, last = [event async for event in stream]
    deltas = [(event.choices[0].index, event.choices[0].delta) for event in events]
    assert [(index, delta.role, delta.content) for index, delta in deltas[:2]] == [
        (0, "assistant", ""),
        (1, "assistant", ""),
    ]
    assert "".join(delta.content for index, delta in deltas if index == 1) == "0 1 2 "
    assert [event.choices[0].finish_reason for event in events[-2:]] == ["length", "length"]
    assert last.usage.total_tokens == 27


async def test_the_blocking_client(surface: Any) -> None:
    def ask() -> tuple[Any, list[str | None]]:
        with openai.OpenAI(base_url=f"{surface.url}/v1", api_key="any", max_retries=0) as client:
            told = client.chat.completions.create(model="toy", messages=[USER], max_tokens=3)
            stream = client.chat.completions.create(model="toy", messages=[USER], max_tokens=3, stream=True)
            return told.choices[0].message.content, [event.choices[0].delta.content for event in stream]

    assert await asyncio.to_thread(ask) == ("0 1 2 ", ["", "0 ", "1 ", "2 "])


async def test_messages_go_through_the_models_template(surface: Any, replicas: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}
    told = await prompt_of(
        surface, replicas, {"role": "developer", "content": "be kind"}, said, {**USER, "content": parts}
    )
    assert told == "<system>be kind</s>\n<assistant>yes</s>\n<user>ab</s>\n<assistant>"
    told = await prompt_of(surface, replicas, USER, extra_body={"add_generation_prompt": False})
    assert told == "<user>hi</s>\n"


async def test_an_answer_can_be_sent_back_as_it_came(surface: Any, replicas: Any) -> None:
    message = (await create(surface)).choices[0].message
    told = await prompt_of(surface, replicas, USER, message.model_dump(), USER)
    assert "<assistant>0 1 2 </s>" in told


async def test_logprobs_come_with_bytes(surface: Any) -> None:
    answer = await create(surface, logprobs=True, top_logprobs=2)
    third = answer.choices[0].logprobs.content[2]
    assert (third.token, third.bytes, third.logprob) == ("!", [33], -2 / 8)
    assert [(top.token, top.logprob) for top in third.top_logprobs] == [("&", -2 / 8 + 1 / 16), ("!", -2 / 8)]
    stream = await create(surface, logprobs=True, stream=True)
    told = [event.choices[0].logprobs async for event in stream]
    assert told[0] is None
    assert [entry.token for piece in told[1:] for entry in piece.content] == ["<s>", "</s>", "!"]
    assert [entry.top_logprobs for piece in told[1:] for entry in piece.content] == [[], [], []]


class Weather(BaseModel):
    sky: Literal["clear", "grey"]


async def test_answers_have_the_form_that_is_asked_for(surface: Any, replicas: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    named = {"name": "x", "schema": schema, "strict": False}
    await create(surface, response_format={"type": "json_schema", "json_schema": named})
    await create(surface, response_format={"type": "json_object"})
    await create(surface, response_format={"type": "text"})
    for outputs in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'}):
        await create(surface, extra_body={"structured_outputs": outputs})
    forms = [task.form for task in replicas.tasks]
    assert json.loads(forms[0].schema) == schema
    assert json.loads(forms[1].schema) == {"type": "object"}
    assert forms[2] is None
    assert forms[3:] == [api.Regex("a+"), api.Choice(("a", "b")), api.Grammar('root ::= "a"')]


async def test_the_clients_own_schemas_are_understood(surface: Any, replicas: Any) -> None:
    parsed = surface.client.chat.completions.parse(model="toy", messages=[USER], max_tokens=3, response_format=Weather)
    with contextlib.suppress(openai.LengthFinishReasonError):  # the fake counts, whatever it is asked for
        await parsed
    assert json.loads(replicas.tasks[0].form.schema)["properties"]["sky"]["enum"] == ["clear", "grey"]
