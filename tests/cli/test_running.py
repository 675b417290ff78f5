"""What the service says of itself when it is ready."""

from __future__ import annotations

import pytest
from rich.console import Console

from ottserve.cli.running import _failed, _ready_message, last_cause
from ottserve.cli.settings import read_settings

SERVED = {
    "model": "toy", "device": "cpu", "backend": "torch", "policy": "ott", "bits_per_element": 2.25,
    "token_capacity": 4096,
}  # fmt: skip
ENCRYPTED = ["--gateway.tls.certificate", "tls.crt", "--gateway.tls.key", "tls.key"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "OpenAI   http://127.0.0.1:8000/v1\n"),
        (["--gateway.http_host", "10.0.0.1", "--gateway.http_port", "8001"], "OpenAI   http://10.0.0.1:8001/v1\n"),
        (ENCRYPTED, "OpenAI   https://127.0.0.1:8000/v1\n"),
        (ENCRYPTED, "chat --ca-file CA.pem\n"),
        (["--gateway.port", "1234"], "chat --target 127.0.0.1:1234\n"),
    ],
)
def test_it_tells_how_to_call_it(flags: list[str], told: str) -> None:
    assert told in _ready_message(read_settings(None, flags), SERVED, 1.0)


def test_an_interface_that_is_off_is_not_told_of() -> None:
    assert "OpenAI" not in _ready_message(read_settings(None, ["--gateway.http_port", "0"]), SERVED, 1.0)


def test_what_a_user_gave_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert _failed(Console(), "model.path=/m/[/b]: no such folder") == 1  # brackets are markup to rich
    assert "/m/[/b]: no such folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("ValueError: cache.group=100: must be one of (32, 64)", "cache.group=100: must be one of (32, 64)"),
        ("ModuleNotFoundError: No module named 'x'", "ModuleNotFoundError: No module named 'x'"),
        ("torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("", None),
    ],
)
def test_of_a_replica_that_failed_the_last_cause_is_told(last: str, told: str | None) -> None:
    text = f"""The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:ottserve:replica.initialize_and_get_metadata() (pid=1)
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 1, in initialize
    return self.__get_result()
{last}
"""
    assert last_cause(text) == told
