"""Ctrl-C while streams run: they end as they should, one that its caller leaves too, then everything is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ottserve import client as oc

LONG = oc.Options(temperature=1.0, seed=3, max_new_tokens=4000)  # minutes: no drain could wait for its end
EXIT_S = 20.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_running_streams_finish_then_nothing_is_left(start_service: Callable[..., Any]) -> None:
    service = start_service()
    answers: list[list[oc.Chunk]] = [[] for _ in range(4)]
    with oc.Client(service.target) as client:
        readers = [threading.Thread(target=_read, args=(client, answer)) for answer in answers]
        left = client.stream("Once upon a time, there was", LONG)
        next(left)
        for reader in readers:
            reader.start()
        while not all(answers):
            time.sleep(0.05)
        service.interrupt()
        for reader in readers:
            reader.join()
        left.close()
        left_at = time.monotonic()
    assert [answer[-1].finish.reason for answer in answers if answer[-1].finish] == [oc.FinishReason.LENGTH] * 4
    assert service.process.wait(60) == 0, service.log.read_text()
    assert time.monotonic() - left_at < EXIT_S, "the replica computes for nobody"
    deadline = time.monotonic() + 5
    while service.processes():
        assert time.monotonic() < deadline, service.processes()
        time.sleep(0.1)


def _read(client: oc.Client, answer: list[oc.Chunk]) -> None:
    options = oc.Options(temperature=1.0, seed=3, max_new_tokens=16)
    for chunk in client.stream("Once upon a time, there was", options):
        answer.append(chunk)  # one by one, since the test waits for the first
