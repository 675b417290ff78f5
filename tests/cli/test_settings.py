"""One set of names in file, environment and flags; whatever is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ottserve.cli.settings import SettingsError, describe, read_settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "ottserve.yaml"
    file.write_text("cache:\n  policy: kivi\n  window: 64\ngateway:\n  port: 1234\n")
    return file


def test_defaults_need_nothing() -> None:
    assert read_settings(None, []).cache.policy == "ott"


def test_flags_win_over_environment_and_that_over_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTTSERVE_CACHE__POLICY", "fp16")
    monkeypatch.setenv("OTTSERVE_GATEWAY__PORT", "2345")
    settings = read_settings(config, ["--gateway.port=3456"])
    assert (settings.cache.window, settings.cache.policy, settings.gateway.port) == (64, "fp16", 3456)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cache.polcy", "ott"], "cache.polcy"),
        (["--cache.policy", "zip"], "cache.policy"),
        (["--cache.k_bits", "3"], "cache.k_bits"),
        (["--cache.preset", "fine"], "cache.preset: .*'balanced'.*, got 'fine'"),
        (["--cache.num_pages", "9", "--cache.memory_bytes", "100"], "^cache.num_pages=9, cache.memory_bytes=100: "),
        (
            ["--deployment.autoscale.min_replicas", "2"],
            "^deployment.autoscale: min_replicas=2: without max_replicas nothing follows the load",
        ),
        (["--model.peer_sums", "true"], "^model.peer_sums=True, model.tensor_parallel=1: "),
        (["--gateway.port", "70000"], "gateway.port"),
        (["--gateway.port", "9464"], "metrics.port=9464"),
        (["--metrics.port", "50051"], "metrics.port=50051"),
        (["--metrics.port", "8000"], "metrics.port=8000"),
        (["--metrics.port", "5000", "--deployment.num_replicas", "2"], "the 2 replicas"),
        (["--scheduler.max_running"], "scheduler.max_running"),
        (["stray"], "stray"),
    ],
)
def test_what_is_wrong_with_a_flag_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        read_settings(None, flags)


def test_a_contradiction_is_told_without_the_section_it_stands_in() -> None:
    with pytest.raises(SettingsError) as refusal:
        read_settings(None, ["--gateway.port", "8000"])
    assert "port=8000, http_port=8000" in str(refusal.value)
    assert "admission" not in str(refusal.value)


@pytest.mark.parametrize("variable", ["OTTSERVE_CACHE__POLCY", "OTTSERVE_CASH__POLICY", "OTTSERVE_POLICY"])
def test_an_unknown_variable_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "ott")
    with pytest.raises(SettingsError, match="no such setting"):
        read_settings(None, [])


def test_the_clients_own_variables_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_settings(None, []).model_dump()
    monkeypatch.setenv("OTTSERVE_TARGET", "10.0.0.1:50051")
    assert read_settings(None, []).model_dump() == expected


@pytest.mark.parametrize("text", ["cache: [", "- cache", "- 1", "3", "cache:\n  polcy: ott\n", "cash: {}\n"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError):
        read_settings(file, [])


def test_every_setting_is_described() -> None:
    lines = list(describe())
    assert all(len(line.split(maxsplit=2)) == 3 for line in lines), "name, default, description"
    assert any(line.startswith("gateway.drain.grace_s") for line in lines)
