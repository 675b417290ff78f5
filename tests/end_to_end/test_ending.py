"""Ctrl-C while four streams run: they end as they should, then everything is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ottserve import client as oc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_running_streams_finish_then_nothing_is_left(start_service: Callable[..., Any]) -> None:
    service = start_service()
    answers: list[list[oc.Chunk]] = [[] for _ in range(4)]
    with oc.Client(service.target) as client:
        readers = [threading.Thread(target=_read, args=(client, answer)) for answer in answers]
        for reader in readers:
            reader.start()
        while not all(answers):
            time.sleep(0.05)
        service.interrupt()
        for reader in readers:
            reader.join()
    assert [answer[-1].finish.reason for answer in answers if answer[-1].finish] == [oc.FinishReason.LENGTH] * 4
    assert service.process.wait(60) == 0, service.log.read_text()
    deadline = time.monotonic() + 5
    while service.processes():
        assert time.monotonic() < deadline, service.processes()
        time.sleep(0.1)


def _read(client: oc.Client, answer: list[oc.Chunk]) -> None:
    options = oc.Options(temperature=1.0, seed=3, max_new_tokens=16)
    for chunk in client.stream("Once upon a time, there was", options):
        answer.append(chunk)  # one by one, since the test waits for the first
