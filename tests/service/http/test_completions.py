"""POST /v1/completions through the real client: what comes back, and what reaches the replica."""

from typing import Any

import openai

from ottserve.service.http.shapes import FINISH_REASONS
from ottserve.workers import api


async def create(surface: Any, **fields: Any) -> Any:
    return await surface.client.completions.create(**({"model": "toy", "prompt": "hi", "max_tokens": 3} | fields))


async def test_an_answer_is_text_reason_usage_and_seed(surface: Any) -> None:
    answer = await create(surface, seed=2**64 - 1)
    [choice] = answer.choices
    assert (answer.object, answer.model, choice.index) == ("text_completion", "toy", 0)
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("0 1 2 ", "length", None)
    assert (choice.seed, choice.stop_reason) == (2**64 - 1, None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_a_stream_says_what_the_whole_answer_says(surface: Any) -> None:
    stream = await create(surface, stream=True, n=2, stream_options={"include_usage": True})
    events = [event async for event in stream]
    *pieces, last = events
    for index in (0, 1):
        mine = [event.choices[0] for event in pieces if event.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == "0 1 2 "
        assert [choice.finish_reason for choice in mine] == [None, None, "length"]
    assert {event.usage for event in pieces} == {None}
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 3, 6)
    assert len({event.id for event in events}) == 1


async def test_usage_can_go_along_with_every_event(surface: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await create(surface, stream=True, stream_options=options)
    counts = [(event.usage.prompt_tokens, event.usage.completion_tokens) async for event in stream]
    assert counts == [(3, 1), (3, 2), (3, 3), (3, 3)]


async def test_no_usage_without_asking_and_the_stream_ends_with_done(surface: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "stream": True}
    async with surface.session.post(f"{surface.url}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = (await response.text()).split("\n\n")
    assert events[1:] == ["data: [DONE]", ""]
    assert '"usage"' not in events[0]


async def test_several_prompts_are_numbered_in_their_order(surface: Any, replicas: Any) -> None:
    answer = await create(surface, prompt=["a", "bcd"], n=2, echo=True, extra_headers={"x-request-id": "many"})
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == ["a0 1 2 ", "a0 1 2 ", "bcd0 1 2 ", "bcd0 1 2 "]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 + 4, 4 * 3)
    assert (answer.id, {task.request_id for task in replicas.tasks}) == ("cmpl-many", {"many-0", "many-1"})


async def test_the_longest_id_is_cut_for_the_numbers_of_prompts(surface: Any, replicas: Any) -> None:
    longest = 128 * "x"
    answer = await create(surface, prompt=["a", "bcd"], extra_headers={"x-request-id": longest})
    assert answer.id == f"cmpl-{longest}"
    assert {task.request_id for task in replicas.tasks} == {126 * "x" + "-0", 126 * "x" + "-1"}


async def test_token_ids_are_a_prompt(surface: Any, replicas: Any) -> None:
    await create(surface, prompt=[73, 74])
    await create(surface, prompt=[[73], [74, 75]])
    prompts = {task.prompt_ids for task in replicas.tasks}
    assert prompts == {(73, 74), (73,), (74, 75)}
    echoed = await create(surface, prompt=[0, 73, 74], echo=True)
    assert echoed.choices[0].text == "hi0 1 2 "


async def test_a_completion_without_a_number_has_16_tokens_as_openai_says(surface: Any, replicas: Any) -> None:
    await create(surface, max_tokens=openai.omit)
    await create(surface, max_tokens=openai.omit, extra_body={"max_completion_tokens": 5})
    assert [task.stops.max_new_tokens for task in replicas.tasks] == [16, 5]


async def test_logprobs_name_tokens_and_where_their_text_begins(surface: Any) -> None:
    """Ids 2 and 3 are "!" and a quotation mark; 7 is the ampersand."""
    answer = await create(surface, max_tokens=4, logprobs=1)
    told = answer.choices[0].logprobs
    assert told.tokens == ["<s>", "</s>", "!", '"']
    assert told.token_logprobs == [0, -1 / 8, -2 / 8, -3 / 8]
    assert told.top_logprobs[2] == {"&": -2 / 8 + 1 / 16, "!": -2 / 8}
    assert told.text_offset == [0, 3, 7, 8]


async def test_an_echoed_prompt_is_scored_before_its_answer(surface: Any) -> None:
    """What lm-eval asks for; the first token has nothing before it."""
    whole = await create(surface, prompt=[[73, 74, 75], [73]], max_tokens=1, logprobs=1, echo=True)
    told = whole.choices[0].logprobs
    assert told.tokens == ["h", "i", "j", "<s>"]
    assert told.token_logprobs == [None, -1 / 4, -2 / 4, 0]
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[1] == {"&": -1 / 4 + 1 / 16, "i": -1 / 4}
    assert told.text_offset == [0, 1, 2, 3]
    assert whole.choices[1].logprobs.token_logprobs == [None, 0]
    assert whole.usage.completion_tokens == 2
    stream = await create(surface, prompt=[73, 74, 75], max_tokens=1, logprobs=1, echo=True, stream=True)
    choices = [event.choices[0] async for event in stream]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [lp for choice in choices for lp in choice.logprobs.token_logprobs] == told.token_logprobs
    assert [offset for choice in choices for offset in choice.logprobs.text_offset] == told.text_offset


async def test_a_prompt_alone_is_scored_without_a_token(surface: Any, replicas: Any) -> None:
    answer = await create(surface, max_tokens=0, echo=True, logprobs=0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("hi", "length")
    assert choice.logprobs.tokens == ["<s>", "h", "i"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert replicas.tasks[0].stops.max_new_tokens == 1


async def test_what_ended_an_answer_is_told(surface: Any, replicas: Any, until: Any) -> None:
    replicas.to_abort.add("r1")
    answer = await create(surface, extra_headers={"x-request-id": "r1"})
    assert answer.choices[0].finish_reason == "abort"
    name, labels = "ottserve_gateway_requests_finished_total", {"method": "/v1/completions", "outcome": "aborted"}
    await until(lambda: surface.value(name, **labels) == 1)


def test_every_reason_has_a_word() -> None:
    assert FINISH_REASONS.keys() == set(api.FinishReason)
