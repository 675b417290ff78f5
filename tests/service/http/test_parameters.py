"""Every field of a body, by name: which value of the task it sets. Nothing is read and then ignored."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from ottserve.service.http.requests import ChatBody, CompletionBody
from ottserve.workers import api

CASES: list[tuple[str, Any, Any]] = [
    ("temperature", 0.5, lambda task: task.sampling.temperature == 0.5),
    ("temperature", 0, lambda task: task.sampling.temperature == 0),
    ("top_p", 0.25, lambda task: task.sampling.top_p == 0.25),
    ("top_k", 0, lambda task: task.sampling.top_k == 0),
    ("min_p", 0.125, lambda task: task.sampling.min_p == 0.125),
    ("repetition_penalty", 1.5, lambda task: task.sampling.repetition_penalty == 1.5),
    ("presence_penalty", 0.5, lambda task: task.sampling.presence_penalty == 0.5),
    ("frequency_penalty", -0.5, lambda task: task.sampling.frequency_penalty == -0.5),
    ("logit_bias", {"5": -100, "6": 1}, lambda task: task.sampling.logit_bias == ((5, -100.0), (6, 1.0))),
    ("seed", 7, lambda task: task.sampling.seed == 7),
    ("n", 3, lambda task: task.n == 3),
    ("max_tokens", 2, lambda task: task.stops.max_new_tokens == 2),
    ("max_completion_tokens", 2, lambda task: task.stops.max_new_tokens == 2),
    ("min_tokens", 2, lambda task: task.stops.min_new_tokens == 2),
    ("stop", "x", lambda task: task.stops.stop == ("x",)),
    ("stop", ["x", "y"], lambda task: task.stops.stop == ("x", "y")),
    ("stop_token_ids", [9], lambda task: task.stops.stop_token_ids == (9,)),
    ("ignore_eos", True, lambda task: task.stops.ignore_eos),
    ("include_stop_str_in_output", True, lambda task: task.stops.include_stop_text),
    ("skip_special_tokens", False, lambda task: not task.skip_special_tokens),
    ("priority", -3, lambda task: task.priority == -3),
    ("cache_salt", "mine", lambda task: task.cache_salt == "mine"),
    ("response_format", {"type": "json_object"}, lambda task: isinstance(task.form, api.JsonSchema)),
    ("structured_outputs", {"regex": "a"}, lambda task: task.form == api.Regex("a")),
    ("logprobs", {"completion": 3, "chat": True}, lambda task: task.logprobs is not None),
    ("add_generation_prompt", {"chat": False}, lambda task: len(task.prompt_ids) == 10),
]
ELSEWHERE = {"model", "prompt", "messages", "stream", "stream_options", "echo", "top_logprobs", "user"}
ENDPOINTS = {
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}


@pytest.mark.parametrize(("name", "value", "holds"), CASES, ids=[f"{name}={value}" for name, value, _ in CASES])
async def test_a_field_reaches_the_task(surface: Any, replicas: Any, name: str, value: Any, holds: Any) -> None:
    by_endpoint = (
        value if isinstance(value, dict) and value.keys() <= ENDPOINTS.keys() else dict.fromkeys(ENDPOINTS, value)
    )
    for endpoint, given in by_endpoint.items():
        path, body = ENDPOINTS[endpoint]
        status, told, _ = await surface.post(path, body | {"max_completion_tokens": None, name: given})
        assert status == 200, told
        assert holds(replicas.tasks[-1])


async def test_null_is_the_default(surface: Any, replicas: Any) -> None:
    for path, body in ENDPOINTS.values():
        for nulls in ({}, dict.fromkeys({name for name, _, _ in CASES if name != "add_generation_prompt"} | {"user"})):
            status, told, _ = await surface.post(path, nulls | body | {"seed": 1})
            assert status == 200, told
        with_nulls, without = replicas.tasks.pop(), replicas.tasks.pop()
        assert (with_nulls.sampling, with_nulls.stops) == (without.sampling, without.stops)


def test_no_field_is_forgotten() -> None:
    fields = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    assert fields == {name for name, _, _ in CASES} | ELSEWHERE


async def test_the_log_tells_the_end_user_and_no_prompt(surface: Any, until: Any) -> None:
    with capture_logs() as lines:
        await surface.post("/v1/completions", {"prompt": "secret", "user": "u-17", "max_tokens": 1})
        await until(lambda: [line for line in lines if line["event"] == "request"])
    [line] = [line for line in lines if line["event"] == "request"]
    assert (line["user"], line["method"], line["outcome"]) == ("u-17", "/v1/completions", "ok")
    assert (line["num_prompt_tokens"], line["num_completion_tokens"], line["finish_reason"]) == (7, 1, "length")
    assert "secret" not in str(lines)
