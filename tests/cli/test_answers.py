"""What the terminal shows of one answer, and of several to the same prompt."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ottserve import client as oc
from ottserve.cli import answers
from ottserve.cli.main import app


def answer(index: int, text: str, others: tuple[oc.Answer, ...] = ()) -> oc.Answer:
    usage, timings = oc.Usage(3, 0, 2), oc.Timings(0.0, 0.1, 0.2, 0.1)
    finish = oc.Finish(oc.FinishReason.EOS, usage, timings, 7 + index, index=index)
    return oc.Answer("r", text, (5, 6), finish, others=others)


THREE = answer(0, "one", (answer(1, "two"), answer(2, "three")))


def test_samples_come_one_a_line_and_are_named_beside(capsys: pytest.CaptureFixture[str]) -> None:
    assert [finish.seed for finish in answers.write_samples(THREE)] == [7, 8, 9]
    out, err = capsys.readouterr()
    assert out == "one\ntwo\nthree\n"
    assert err == "[1 of 3, seed 7]\n[2 of 3, seed 8]\n[3 of 3, seed 9]\n"


def test_json_has_all_samples(capsys: pytest.CaptureFixture[str]) -> None:
    answers.write_json(THREE)
    record = json.loads(capsys.readouterr().out)
    assert [other["text"] for other in record["others"]] == ["two", "three"]
    assert {finish["reason"] for finish in (record["finish"], record["others"][1]["finish"])} == {"eos"}


class Asked:
    """A client that keeps what it is asked."""

    def __init__(self) -> None:
        self.options: list[oc.Options] = []

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def generate(self, prompt: oc.Prompt, options: oc.Options, timeout_s: float | None) -> oc.Answer:
        self.options.append(options)
        return THREE


def test_number_and_priority_reach_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Asked()
    monkeypatch.setattr("ottserve.cli.ask.connection", lambda *where: client)
    shown = CliRunner().invoke(app, ["generate", "hi", "--n", "3", "--priority", "-5", "--usage"])
    assert shown.exit_code == 0 and shown.stdout == "one\ntwo\nthree\n"
    assert shown.stderr.count("prompt tokens") == 3
    [options] = client.options
    assert (options.n, options.priority) == (3, -5)
