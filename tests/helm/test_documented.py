"""The commands of docs/operations.md, as Helm takes their values."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from tests.helm.values import HELM, Values, at, merged, nested

PAGE = (HELM.parent / "docs" / "operations.md").read_text()


def commands() -> Iterator[list[str]]:
    """Words of each `helm install` and `helm upgrade`, in order."""
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] in (["helm", "install"], ["helm", "upgrade"]):
                yield words


def test_documented_commands_render(render: Callable[..., Any]) -> None:
    """One after the other, since an upgrade reuses the values before it."""
    values: Values = {}
    for words in commands():
        assignments = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
        for path, _, text in (part.partition("=") for word in assignments for part in word.split(",")):
            values = merged(values, nested(path, yaml.safe_load(text)))
        render(values)
    assert at(values, "replica.gpus") == 1
    assert at(values, "gateway.tlsSecret") == "demo-tls"
