"""What a Prometheus has seen over a span of time, as the dashboard's queries ask for it. Draws nothing."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

NUM_POINTS = 240
TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel.

    Attributes:
        labels: of the series, without its name.
        times_s: of each value, from the beginning of the span.
    """

    legend: str
    labels: dict[str, str]
    times_s: list[float]
    values: list[float]


@dataclass(frozen=True, slots=True)
class History:
    """A span of time at one Prometheus; every job and every instance."""

    address: str
    began_s: float
    ended_s: float
    rate_interval: str

    def of(self, target: dict[str, Any]) -> list[Series]:
        """The series of one of a panel's queries.

        Raises:
            ValueError: Prometheus refuses the query; the message says why.
        """
        step_s = max(1.0, (self.ended_s - self.began_s) / NUM_POINTS)
        span = {"start": self.began_s, "end": self.ended_s, "step": step_s}
        found = self._ask("query_range", query=self._chosen(target["expr"]), **span)["result"]
        return [
            Series(
                _legend(target["legendFormat"], one["metric"]),
                {name: value for name, value in one["metric"].items() if name != "__name__"},
                [float(moment) - self.began_s for moment, _ in one["values"]],
                [float(value) for _, value in one["values"]],
            )
            for one in found
        ]

    def _chosen(self, expression: str) -> str:
        for name, value in (("$__rate_interval", self.rate_interval), ("$job", ".*"), ("$instance", ".*")):
            expression = expression.replace(name, value)
        return expression

    def _ask(self, path: str, **parameters: Any) -> Any:
        url = f"{self.address.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters['query']}: {json.load(error)['error']}") from None


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)
