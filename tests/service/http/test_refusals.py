"""Every way to be refused: status, OpenAI's error object, and what a client is told to do about it."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from ottserve.service.errors import TABLE
from ottserve.service.http.errors import WORDS
from ottserve.workers import api

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKEN_HASH = "992db5e2595725ef68eb5066e014da8c7f6baca0afa96f1021b56b66782133f2"  # of "let me in"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


def prompt(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi"} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return message() | fields


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
NAMED = {"name": "x", "schema": {}}

INVALID: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, b"", "body", "JSON"),
    (COMPLETIONS, b'{"prompt": "hi"', "body", "JSON"),
    (COMPLETIONS, b'{"prompt": "\xff"}', "body", "JSON"),
    (COMPLETIONS, b'{"prompt": "hi", "temperature": NaN}', "body", "JSON"),
    (COMPLETIONS, b'{"prompt": "hi", "temperature": 1e999}', "temperature", "finite"),
    (COMPLETIONS, b"[" * 100_000, "body", "JSON"),
    (COMPLETIONS, [1], "body", "object"),
    (COMPLETIONS, {}, "prompt", "required"),
    (COMPLETIONS, prompt(prompt=""), "prompt", "at least one character"),
    (COMPLETIONS, prompt(prompt=[]), "prompt", "list of token ids"),
    (COMPLETIONS, prompt(prompt=[1, "a"]), "prompt", "list of token ids"),
    (COMPLETIONS, prompt(prompt=[True]), "prompt", "list of token ids"),
    (COMPLETIONS, prompt(prompt=[2**31]), "prompt", "list of token ids"),
    (COMPLETIONS, prompt(prompt=[5, 258]), "prompt[1]", "0 to 257"),
    (COMPLETIONS, prompt(prompt=[[]]), "prompt", "1 to 99 tokens"),
    (COMPLETIONS, prompt(prompt="x" * 99), "prompt", "1 to 99 tokens"),
    (COMPLETIONS, prompt(prompt=["x"] * 129), "prompt", "at most 128 choices"),
    (COMPLETIONS, prompt(prompt=["x"] * 2, n=65), "prompt", "at most 128 choices"),
    (COMPLETIONS, prompt(n=0), "n", "1 to 128"),
    (COMPLETIONS, prompt(max_tokens=0), "max_tokens", "1 or more"),
    (COMPLETIONS, prompt(max_tokens=-1, echo=True), "max_tokens", "1 or more"),
    (COMPLETIONS, prompt(max_tokens=2**31), "max_tokens", "less than 2147483648"),
    (COMPLETIONS, prompt(max_tokens=1.5), "max_tokens", "a valid integer"),
    (COMPLETIONS, prompt(max_tokens=1, max_completion_tokens=2), "max_completion_tokens", "max_tokens=1"),
    (COMPLETIONS, prompt(min_tokens=5, max_tokens=4), "min_tokens", "0 to 4"),
    (COMPLETIONS, prompt(temperature=-1), "temperature", "0 to 100"),
    (COMPLETIONS, prompt(temperature="1"), "temperature", "a valid number"),
    (COMPLETIONS, prompt(temperature=1e300), "temperature", "0 to 100"),
    (COMPLETIONS, prompt(top_p=0), "top_p", "over 0 to 1"),
    (COMPLETIONS, prompt(seed=-1), "seed", "greater than or equal to 0"),
    (COMPLETIONS, prompt(seed=2**64), "seed", "less than"),
    (COMPLETIONS, prompt(stop=["a", 1]), "stop[1]", "a valid string"),
    (COMPLETIONS, prompt(stop=["a", ""]), "stop[1]", "1 to 512 characters"),
    (COMPLETIONS, prompt(stop=["a"] * 17), "stop", "at most 16 strings"),
    (COMPLETIONS, prompt(logit_bias={"x": 1}), "logit_bias", "token ids"),
    (COMPLETIONS, prompt(logit_bias={"258": 1}), "logit_bias", "0 to 257"),
    (COMPLETIONS, prompt(logit_bias={"5": 101}), "logit_bias[5]", "-100 to 100"),
    (COMPLETIONS, prompt(logprobs=21), "logprobs", "0 to 20"),
    (COMPLETIONS, prompt(stream_options={"include_usage": True}), "stream_options", "stream: true"),
    (COMPLETIONS, prompt(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", "boolean"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, message(role=""), "messages[0].role", "1 to 64 characters"),
    (CHAT, message(role="tool"), "messages", "no tools here"),
    (CHAT, message(content=5), "messages[0].content", "a text"),
    (CHAT, message(content=[IMAGE]), "messages[0].content", "'image_url' is not served"),
    (CHAT, message(content=[{"type": "text", "text": "a", "x": 1}]), "messages[0].content", "type text"),
    (CHAT, chat(top_logprobs=1), "top_logprobs", "logprobs: true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "logprobs", "0 to 20"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "json_schema"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema", "with type json_schema"),
    (CHAT, chat(response_format={"type": "text", "json_schema": NAMED}), "response_format.json_schema", "no other"),
    (CHAT, chat(structured_outputs={}), "structured_outputs", "one of regex"),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs", "one of regex"),
    (CHAT, chat(structured_outputs={"choice": []}), "structured_outputs.choice", "1 to 1024 texts"),
    (
        CHAT,
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "structured_outputs",
        "response_format",
    ),
    (CHAT, chat(user="u" * 257), "user", "at most 256 characters"),
]


@pytest.mark.parametrize(("path", "body", "param", "limit"), INVALID)
async def test_bad_input_is_named(surface: Any, replicas: Any, path: str, body: Any, param: str, limit: str) -> None:
    status, told, headers = await surface.post(path, body)
    error = told["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_value")
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert limit in error["message"]
    assert headers["x-should-retry"] == "false"
    assert not replicas.tasks


NOT_SERVED: list[tuple[str, Any, str]] = [
    (COMPLETIONS, prompt(best_of=2), "best_of"),
    (COMPLETIONS, prompt(suffix="x"), "suffix"),
    (COMPLETIONS, prompt(temprature=1), "temprature"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(audio={"voice": "x"}), "audio"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities"),
    (CHAT, chat(store=True), "store"),
    (CHAT, chat(reasoning_effort="high"), "reasoning_effort"),
    (CHAT, message(tool_calls=[{"id": "1"}]), "messages[0].tool_calls"),
    (CHAT, message(name="bob"), "messages[0].name"),
    (CHAT, message(x=1), "messages[0].x"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": NAMED | {"description": "d"}}),
        "response_format.json_schema.description",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), NOT_SERVED)
async def test_what_is_not_served_is_refused_by_name(surface: Any, path: str, body: Any, param: str) -> None:
    status, told, _ = await surface.post(path, body)
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "unsupported_parameter", param)


async def test_what_asks_for_nothing_is_let_pass(surface: Any) -> None:
    nothing = {"tools": [], "tool_choice": "none", "store": False, "modalities": ["text"], "service_tier": "auto"}
    assert (await surface.post(CHAT, chat(**nothing)))[0] == 200
    assert (await surface.post(COMPLETIONS, prompt(best_of=1, suffix="")))[0] == 200


async def test_another_model_is_not_found(surface: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await surface.client.completions.create(model="other", prompt="hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await surface.client.models.retrieve("other")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", COMPLETIONS, 405)])
async def test_unknown_paths_speak_the_same_language(surface: Any, method: str, path: str, status: int) -> None:
    async with surface.session.request(method, surface.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == "unknown_url"


async def test_a_large_body_is_refused_before_it_is_read(open_surface: Any) -> None:
    surface = await open_surface(messages={"max_request_bytes": 2000})
    status, told, headers = await surface.post(COMPLETIONS, prompt(prompt="x" * 3000))
    assert (status, told["error"]["param"]) == (413, "body")
    assert "at most 2000 bytes" in told["error"]["message"]
    assert headers["connection"] == "close"
    assert (await surface.post(COMPLETIONS, prompt()))[0] == 200


async def test_a_large_body_that_is_only_announced_is_refused_at_once(surface: Any) -> None:
    url = urlsplit(surface.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n".encode())
    async with asyncio.timeout(10):
        assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_a_full_queue_says_when_to_come_back(open_surface: Any, replicas: Any, until: Any) -> None:
    surface = await open_surface(admission={"max_requests": 1, "retry_after_ms": 1500})
    replicas.pause_s = 0.05
    first = await surface.client.completions.create(model="toy", prompt="hi", stream=True)
    with pytest.raises(openai.RateLimitError) as caught:
        await surface.client.completions.create(model="toy", prompt="hi")
    assert caught.value.code == "rate_limit_exceeded"
    headers = caught.value.response.headers
    assert (headers["retry-after-ms"], headers["retry-after"]) == ("1500", "2")
    assert "x-should-retry" not in headers
    await first.close()
    await until(lambda: surface.value("ottserve_gateway_requests_in_flight", method=COMPLETIONS) == 0)


async def test_a_prompt_too_many_ends_them_all(open_surface: Any, replicas: Any, until: Any) -> None:
    surface = await open_surface(admission={"max_requests": 2})
    replicas.pause_s = 0.05
    status, told, _ = await surface.post(COMPLETIONS, prompt(prompt=["a", "b", "c"], max_tokens=50))
    assert (status, told["error"]["code"]) == (429, "rate_limit_exceeded")
    await until(lambda: len(replicas.cancelled) == len(replicas.tasks))
    replicas.pause_s = 0
    assert (await surface.post(COMPLETIONS, prompt(prompt=["a", "b"])))[0] == 200


async def test_an_id_is_live_once(surface: Any, replicas: Any) -> None:
    replicas.pause_s = 0.05
    headers = {"x-request-id": "same"}
    first = await surface.client.completions.create(model="toy", prompt="hi", stream=True, extra_headers=headers)
    status, told, answered = await surface.post(COMPLETIONS, prompt(), **headers)
    assert (status, told["error"]["code"], answered["x-should-retry"]) == (409, "duplicate_request_id", "false")
    await first.close()


async def test_ids_are_echoed_and_checked(surface: Any) -> None:
    status, _, headers = await surface.post(COMPLETIONS, prompt(), **{"x-request-id": "r-1"})
    assert (status, headers["x-request-id"]) == (200, "r-1")
    status, told, headers = await surface.post(COMPLETIONS, prompt(), **{"x-request-id": "r 1"})
    assert (status, told["error"]["param"]) == (400, "x-request-id")
    assert headers["x-request-id"] != "r 1"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_deadline_counts_from_the_beginning(surface: Any, replicas: Any, until: Any, streams: bool) -> None:
    replicas.pause_s = 5
    status, told, headers = await surface.post(COMPLETIONS, prompt(stream=streams), **{"x-request-timeout-ms": "50"})
    assert (status, told["error"]["code"], headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert replicas.tasks[0].deadline_at - replicas.tasks[0].received_at == pytest.approx(0.05)
    await until(lambda: replicas.cancelled)


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "x", "99999999999", ""])
async def test_a_deadline_is_milliseconds(surface: Any, given: str) -> None:
    status, told, _ = await surface.post(COMPLETIONS, prompt(), **{"x-request-timeout-ms": given})
    assert (status, told["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_a_lost_replica_is_unavailable_and_safe_to_try_again(surface: Any, replicas: Any) -> None:
    replicas.failures = [(0, api.Unavailable("the replica was lost", 250))] * 2
    status, told, headers = await surface.post(COMPLETIONS, prompt())
    assert (status, told["error"]["code"], headers["retry-after-ms"]) == (503, "unavailable", "250")
    replicas.failures = [(0, api.Unavailable("the replica was lost"))]
    assert (await surface.post(COMPLETIONS, prompt()))[0] == 200, "the gateway tried once more"


async def test_a_broken_stream_says_so_and_is_not_repeated(surface: Any, replicas: Any) -> None:
    replicas.failures = [(2, api.Unavailable("gone"))]
    status, told, headers = await surface.post(COMPLETIONS, prompt())
    assert (status, told["error"]["code"], headers["x-should-retry"]) == (503, "stream_broken", "false")
    replicas.failures = [(2, api.Unavailable("gone"))]
    stream = await surface.client.completions.create(model="toy", prompt="hi", stream=True)
    texts = []
    with pytest.raises(openai.APIError) as caught:
        async for event in stream:
            texts.append(event.choices[0].text)
    assert texts == ["0 ", "1 "]
    assert caught.value.code == "stream_broken"


async def test_our_own_faults_tell_an_id_and_nothing_else(surface: Any, replicas: Any) -> None:
    replicas.failures = [(0, ZeroDivisionError("/secret/path"))]
    status, told, _ = await surface.post(COMPLETIONS, prompt(), **{"x-request-id": "r9"})
    assert (status, told["error"]["code"]) == (500, "internal_error")
    assert told["error"]["message"] == "internal error in request r9"
    assert surface.value("ottserve_gateway_internal_errors_total", reason="ZeroDivisionError") == 1


async def test_who_has_no_token_is_refused_before_any_work(open_surface: Any, tmp_path: Any, replicas: Any) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"- name: me\n  sha256: [{TOKEN_HASH}]\n  max_requests: 1\n")
    surface = await open_surface(tokens_file=str(tokens))
    for path in ("/v1/models", "/v1/models/toy"):
        async with surface.session.get(surface.url + path) as response:
            assert response.status == 401
    for path in (COMPLETIONS, CHAT):
        status, told, _ = await surface.post(path, b"no JSON")
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        await surface.client.models.list()
    assert not replicas.tasks
    client = surface.client.with_options(api_key="let me in")
    assert (await client.completions.create(model="toy", prompt="hi", max_tokens=1)).choices[0].text == "0 "
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="toy", prompt=["a", "b"])


def test_every_status_of_the_table_and_no_other_has_words() -> None:
    assert {row.code for row in TABLE.values()} == WORDS.keys()
