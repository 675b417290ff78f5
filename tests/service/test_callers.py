"""The tokens file: who is known, what is refused, and that nothing secret is told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from ottserve.service import callers as service_callers
from ottserve.service.callers import ANYONE, Callers, Unauthenticated


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


ENTRIES: list[dict[str, Any]] = [
    {"name": "a", "sha256": [sha256("old"), sha256("new")], "max_requests": 3},
    {"name": "b", "sha256": [sha256("other")]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump(ENTRIES))
    return path


def test_each_token_is_its_callers(file: Path) -> None:
    callers = Callers(str(file))
    names = [callers.identify(f"Bearer {token}").name for token in ("old", "new", "other")]
    assert names == ["a", "a", "b"]
    assert callers.identify("bearer old").max_requests == 3, "the scheme's case does not count"


NOBODY = (
    None,
    "",
    "old",
    "Bearer",
    "Bearer ",
    "Basic old",
    "Bearer Old",
    "Bearer old ",
    "Bearer ü",
    "Bearer old, Bearer old",
)


@pytest.mark.parametrize("authorization", [*NOBODY, f"Bearer {sha256('old')}"])
def test_anything_else_is_nobody(file: Path, authorization: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Callers(str(file)).identify(authorization)
    assert "old" not in caught.value.message


def test_without_a_file_anyone_may_call() -> None:
    assert Callers(None).identify(None) is ANYONE


def test_every_hash_is_compared_whatever_the_token(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time it takes tells neither whose token it is nor how much of it is right."""
    compared: list[str] = []

    def compare(given: str, known: str) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(service_callers.hmac, "compare_digest", compare)
    callers = Callers(str(file))
    callers.identify("Bearer old")
    first, compared[:] = list(compared), []
    with pytest.raises(Unauthenticated):
        callers.identify("Bearer wrong")
    assert first == compared == [known for entry in ENTRIES for known in entry["sha256"]]


def test_json_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(ENTRIES))
    assert Callers(str(path)).identify("Bearer other").name == "b"


def test_an_empty_list_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("[]")
    with pytest.raises(Unauthenticated):
        Callers(str(path)).identify("Bearer old")


ONE, TWO = sha256("one"), sha256("two")


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ("", "valid tuple"),
        ("- [", "line"),
        ("- {name: a}", r"0\.sha256"),
        ("- {name: a, sha256: []}", r"0\.sha256"),
        ("- {name: a, sha256: [plain-secret]}", r"0\.sha256\.0"),
        (f"- {{name: 'two words', sha256: ['{ONE}']}}", r"0\.name"),
        (f"- {{name: a, sha256: ['{ONE}'], max_request: 1}}", "max_request"),
        (f"- {{name: a, sha256: ['{ONE}'], max_requests: 0}}", "max_requests"),
        (f"- {{name: a, sha256: ['{ONE}'], max_priority: 101}}", "max_priority"),
        (f"- {{name: a, sha256: ['{ONE}']}}\n- {{name: a, sha256: ['{TWO}']}}", "name a is there twice"),
        (f"- {{name: a, sha256: ['{ONE}', '{ONE}']}}", f"sha256 {ONE} is there twice"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_values(tmp_path: Path, entries: str, named: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(entries)
    with pytest.raises(ValueError, match=named) as caught:
        Callers(str(path))
    assert str(path) in str(caught.value)
    assert "plain-secret" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(OSError, match="nowhere"):
        Callers("/nowhere/tokens.yaml")


def test_a_change_is_in_force_at_the_next_call(file: Path) -> None:
    callers = Callers(str(file))
    file.write_text(yaml.safe_dump([{"name": "c", "sha256": [sha256("third")]}]))
    assert callers.identify("Bearer third").name == "c"
    with pytest.raises(Unauthenticated):
        callers.identify("Bearer old")


@pytest.mark.parametrize("change", ["- {name: a, sha256: [plain-secret]}", None])
def test_a_broken_change_leaves_the_old_tokens_and_is_logged_once(file: Path, change: str | None) -> None:
    callers = Callers(str(file))
    if change is None:
        file.unlink()
    else:
        file.write_text(change)
    with capture_logs() as logs:
        assert [callers.identify("Bearer old").name for _ in range(3)] == ["a"] * 3
    [line] = logs
    assert (line["log_level"], line["files"]) == ("error", [str(file)])
    assert "plain-secret" not in str(line)
