"""Whoever is silent for long is named, once; signs of life and messages go by one line without cutting each other."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

import pytest
from structlog.testing import capture_logs

from ottserve.workers.engine.ranks import pulse
from ottserve.workers.engine.ranks.pulse import SILENT_S, Alive, Line, Pulse


def test_silent_ranks_are_named_once_and_again_after_they_have_answered() -> None:
    now = 0.0
    heard = Pulse((1, 2, 3), lambda: now)

    def named(*ranks: int) -> list[tuple[str, int]]:
        with capture_logs() as logs:
            heard.look(ranks)
        return [(log["event"], log["rank"]) for log in logs]

    now = SILENT_S
    heard.hear(2)
    assert named(1, 2, 3) == []
    now += 1
    assert named(1, 2) == [("rank_silent", 1)], "2 has been heard of, and 3 is no longer looked at"
    assert named(1, 2) == []
    with capture_logs() as logs:
        heard.hear(1)
        heard.hear(2)
    assert [(log["event"], log["rank"]) for log in logs] == [("rank_answers_again", 1)]
    now += SILENT_S + 1
    assert named(1, 2) == [("rank_silent", 1), ("rank_silent", 2)]


def test_signs_come_between_long_messages_until_the_line_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    line, other_end = Line(ours.detach()), Connection(theirs.detach())
    line.give_signs()
    long = "x" * 2**20

    def send() -> None:
        for _ in range(8):
            line.send(long)
        line.close()

    sender = threading.Thread(target=send)
    sender.start()
    heard = []
    with pytest.raises(EOFError):
        while True:
            heard.append(other_end.recv())
    sender.join()
    other_end.close()
    assert heard.count(long) == 8 and Alive() in heard and len(heard) == 8 + heard.count(Alive())
