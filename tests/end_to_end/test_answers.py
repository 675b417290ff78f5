"""What a user gets of the real service over gRPC: answers, streams, limits, numbers."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from ottserve import client as oc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RunCommand = Callable[..., subprocess.CompletedProcess[str]]

CAPITAL = oc.Chat.user("What is the capital of France?")
GREEDY = oc.Options(temperature=0.0, max_new_tokens=32)
LONG = oc.Options(temperature=1.0, seed=1, max_new_tokens=2000)
STORY = "Once upon a time, in a village by the sea,"


def test_it_knows_the_capital_of_france(client: oc.Client) -> None:
    answer = client.generate(CAPITAL, GREEDY)
    assert "Paris" in answer.text
    assert answer.finish.reason is oc.FinishReason.EOS
    assert answer.finish.usage.num_completion_tokens == len(answer.token_ids)


def test_a_stream_concatenates_to_the_unary_answer(client: oc.Client) -> None:
    chunks = list(client.stream(CAPITAL, GREEDY))
    answer = client.generate(CAPITAL, GREEDY)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == answer.token_ids
    assert len(chunks) > 1


def test_the_seed_of_an_answer_reproduces_it(client: oc.Client) -> None:
    first = client.generate(STORY, oc.Options(temperature=1.0, max_new_tokens=12))
    again = client.generate(STORY, oc.Options(temperature=1.0, max_new_tokens=12, seed=first.finish.seed))
    assert again.text == first.text


def test_a_cancelled_stream_frees_its_slot(client: oc.Client, idle_within: Callable[[float], None]) -> None:
    stream = client.stream(STORY, LONG)
    next(stream)
    deadline = time.monotonic() + 3.0
    while client.load()[0].num_running != 1:  # a replica tells a tenth of a second late
        assert time.monotonic() < deadline, client.load()
    stream.close()
    idle_within(3.0)


def test_a_deadline_ends_the_work(client: oc.Client, idle_within: Callable[[float], None]) -> None:
    began = time.monotonic()
    with pytest.raises(oc.DeadlineExceeded):
        client.generate(STORY, LONG, timeout_s=1.0)
    assert time.monotonic() - began < 3.0
    idle_within(3.0)


def test_abort_ends_a_stream_with_what_there_is(client: oc.Client, idle_within: Callable[[float], None]) -> None:
    stream = client.stream(STORY, oc.Options(temperature=1.0, seed=1, max_new_tokens=2000, request_id="to-abort"))
    next(stream)
    assert client.abort("to-abort") is True
    assert list(stream)[-1].finish.reason is oc.FinishReason.ABORTED
    assert client.abort("to-abort") is False
    idle_within(3.0)


def test_a_field_out_of_range_is_named(client: oc.Client) -> None:
    with pytest.raises(oc.InvalidArgument) as caught:
        client.generate(CAPITAL, oc.Options(top_p=2.0))
    assert "top_p" in caught.value.fields[0].field


def test_tokens_there_and_back(client: oc.Client) -> None:
    tokens = client.tokenize("Grüße, 世界")
    assert client.detokenize(tokens.token_ids) == "Grüße, 世界"


def test_it_tells_how_its_cache_is_held(client: oc.Client) -> None:
    cache = client.server_info().cache
    assert (cache.policy, cache.k_bits, cache.v_bits) == ("ott", 2, 2)
    assert (cache.k_fine, cache.k_fine_bits, cache.fit_rounds) == (16, 2, 8)
    load = client.load()[0]
    assert load.pages_used + load.pages_cached + load.pages_free == load.pages_total


def test_metrics_of_gateway_and_replica(service: Any, client: oc.Client) -> None:
    client.generate(CAPITAL, GREEDY)
    gateway = f"127.0.0.1:{service.metrics_port}"
    targets = [target for group in json.loads(_get(f"http://{gateway}/sd")) for target in group["targets"]]
    assert gateway in targets
    pages = [_get(f"http://{target}/metrics") for target in targets]
    assert len(pages) == 2
    assert any("ottserve_kv_memory_bytes" in page for page in pages)
    generated = [line for page in pages for line in page.splitlines() if line.startswith("ottserve_generated_tokens_")]
    assert float(generated[0].split()[-1]) > 0


def test_the_command(service: Any, run_command: RunCommand) -> None:
    here = ("--target", service.target)
    said = run_command("generate", "What is the capital of France?", "--temperature", "0", "--usage", *here)
    assert "Paris" in said.stdout
    assert "prompt tokens" in said.stderr
    answer = json.loads(run_command("generate", "--json", "--raw", "One, two,", "--max-new-tokens", "4", *here).stdout)
    assert answer["finish"]["usage"]["num_prompt_tokens"] > 0
    info = json.loads(run_command("info", "--json", *here).stdout)
    assert info["server"]["cache"]["policy"] == "ott"
    assert "'Hello'" in run_command("tokenize", "Hello world", *here).stdout
    assert run_command("chat", "--max-new-tokens", "8", *here, stdin="Say hello.\n/exit\n").stdout.strip() != ">"


def test_a_second_service_on_the_same_port_says_so(service: Any, run_command: RunCommand) -> None:
    second = run_command("serve", "--gateway.port", str(service.port), check=False)
    assert second.returncode == 1
    assert f"gateway.port={service.port}" in second.stderr


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text
