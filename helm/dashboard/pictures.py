"""Draws the dashboard's panels from what a Prometheus has seen, one picture a row; no Grafana is needed.

    python helm/dashboard/pictures.py http://127.0.0.1:9090 --minutes 5 --out pictures

Reads the JSON that the chart holds, so a picture shows what Grafana would ask for.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from drawing import Panel, draw
from history import History

DASHBOARD = Path(__file__).parents[1] / "ottserve" / "files" / "dashboard.json"


def main(
    prometheus: Annotated[str, typer.Argument(help="Address of a Prometheus that scrapes the service.")],
    out: Annotated[Path, typer.Option(help="Folder of the pictures.", file_okay=False)] = Path("pictures"),
    minutes: Annotated[float, typer.Option(help="How far back from the end.", min=0.05)] = 15.0,
    end: Annotated[float | None, typer.Option(help="End as UNIX time; now if none is given.")] = None,
    rate_interval: Annotated[str, typer.Option(help="What `$__rate_interval` stands for.")] = "1m",
) -> None:
    """Draw every row of the dashboard, and name the panels that had nothing to show."""
    end_s = time.time() if end is None else end
    history = History(prometheus, end_s - 60 * minutes, end_s, rate_interval)
    out.mkdir(parents=True, exist_ok=True)
    mpl.use("agg")
    for title, panels in rows(json.loads(DASHBOARD.read_text())["panels"]):
        shown = [(panel, [history.of(target) for target in panel["targets"]]) for panel in panels]
        path = out / f"{re.sub('[^a-z]+', '-', title.lower())}.png"
        draw(title, [(panel, [one for found in series for one in found]) for panel, series in shown], path)
        empty = [panel["title"] for panel, series in shown if not any(map(has_value, series))]
        typer.echo(f"{path}" + (f"; nothing in: {', '.join(empty)}" if empty else ""))


def rows(panels: list[Panel]) -> Iterator[tuple[str, list[Panel]]]:
    """Headings with the panels under each."""
    found: dict[str, list[Panel]] = {}
    for panel in panels:
        if panel["type"] == "row":
            under = found[panel["title"]] = []
        else:
            under.append(panel)
    yield from found.items()


def has_value(series: Any) -> bool:
    """Whether anything in it is a number."""
    return any(math.isfinite(value) for one in series for value in one.values)


if __name__ == "__main__":
    typer.run(main)
