"""The first signal drains, the second stops, later ones are passed over."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ottserve.workers.signals import DrainRequested, Phase, StopRequested, StopSignals


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_drains_second_stops_third_is_nothing(number: int) -> None:
    with StopSignals() as signals:
        with pytest.raises(DrainRequested):
            send(number)
        assert signals.phase is Phase.DRAINING
        with pytest.raises(StopRequested):
            send(number)
        assert signals.phase is Phase.STOPPING
        send(number)


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
