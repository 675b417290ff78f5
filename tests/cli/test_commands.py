"""The command without a server: help that is quick, and errors that say what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import grpc
import pytest
from typer.testing import CliRunner

from ottserve import client as oc
from ottserve.cli.connect import explain
from ottserve.cli.main import app
from ottserve.target import DEFAULT_TARGET

COMMANDS = (
    *("serve", "settings", "generate", "chat", "info", "tokenize", "metrics", "wait-idle"),
    *("capacity", "latency", "fuzz", "token", "bench-gateway", "bench-prefill"),
)
FREE_PORTS = ("--gateway.port", "0", "--gateway.http_port", "0", "--gateway.metrics.port", "0")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--help" in out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ottserve.cli.main import app\n"
        "heavy = {'torch', 'ray', 'transformers', 'grpc', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", [("generate", "hi"), ("info",), ("tokenize", "hi"), ("chat",)])
def test_without_a_server_it_says_how_to_start_one(command: tuple[str, ...]) -> None:
    code, _, err = run(*command, "--target", "127.0.0.1:1")
    assert code == 1
    assert "make serve" in err
    assert "127.0.0.1:1" in err


def test_the_default_target_is_the_clients() -> None:
    assert DEFAULT_TARGET == oc.DEFAULT_TARGET


def test_system_and_raw_contradict() -> None:
    code, _, err = run("generate", "hi", "--raw", "--system", "be brief")
    assert code == 2
    assert "--system" in err


def test_settings_that_are_wrong_end_with_two() -> None:
    code, _, err = run("serve", "--cache.policy", "zip")
    assert code == 2
    assert "cache.policy" in err


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        code, _, err = run("serve", "--gateway.port", str(port))
    assert code == 1
    assert f"gateway.port={port}" in err
    assert time.monotonic() - began < 5


def test_a_model_that_is_not_there_is_named_before_anything_starts() -> None:
    code, _, err = run("serve", *FREE_PORTS, "--model.path", "/no/such/model")
    assert code == 1
    assert "model.path=/no/such/model" in err


@pytest.mark.parametrize(
    "flags",
    [
        ("--gateway.tokens_file", "/no/such/file"),
        ("--gateway.tls.certificate", "/no/such/file", "--gateway.tls.key", "/no/such/file"),
    ],
)
def test_files_of_tokens_and_certificates_are_read_before_anything_starts(flags: tuple[str, ...]) -> None:
    code, _, err = run("serve", *FREE_PORTS, "--model.path", "toy", *flags)
    assert (code, "/no/such/file" in err) == (1, True)


def test_refused_fields_are_explained_by_name() -> None:
    problem = oc.FieldProblem("top_p", "must be over 0 to 1, got 2.0")
    error = oc.InvalidArgument("bad", grpc.StatusCode.INVALID_ARGUMENT, (problem,))
    assert explain(error, "x") == "top_p: must be over 0 to 1, got 2.0"
