"""The forms that queries take: rate before quantile, rate before division, one quantile a query. Knows no panel."""

from __future__ import annotations

SERVICE = 'job=~"$job"'
REPLICA = f'{SERVICE},instance=~"$instance"'


def scope(metric: str) -> str:
    """Label matchers of a metric: gateways are told apart by job, replicas by instance too."""
    return SERVICE if metric.startswith("ottserve_gateway_") else REPLICA


def series(metric: str, matchers: str = "") -> str:
    """The series of a metric that the variables select."""
    return f"{metric}{{{','.join(filter(None, (scope(metric), matchers)))}}}"


def total(metric: str, matchers: str = "", by: str = "") -> str:
    """Sum of a gauge."""
    return f"sum{_by(by)} ({series(metric, matchers)})"


def rate(metric: str, matchers: str = "", by: str = "") -> str:
    """Growth a second of a counter."""
    return f"sum{_by(by)} (rate({series(metric, matchers)}[$__rate_interval]))"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """One quantile of a histogram over all that is selected."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', by=labels)})"


def mean(histogram: str) -> str:
    """Mean of what a histogram observed."""
    return ratio(rate(f"{histogram}_sum"), rate(f"{histogram}_count"))


def ratio(part: str, whole: str) -> str:
    """A part of a whole that is never 0."""
    return f"({part}) / ({whole})"


def share(part: str, whole: str) -> str:
    """A part of a whole; 0 where there is nothing."""
    return f"({part}) / (({whole}) > 0) or vector(0)"


def quantiles(histogram: str) -> dict[str, str]:
    """The usual three, a query each."""
    return {f"p{round(100 * q)}": quantile(q, histogram) for q in (0.5, 0.9, 0.99)}


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
