"""What a panel is here, and how it becomes Grafana's. Knows no metric."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


class Unit(StrEnum):
    """Grafana's ids of the units in use."""

    SECONDS = "s"
    BYTES = "bytes"
    SHARE = "percentunit"
    NUMBER = "short"
    REQUESTS_PER_S = "reqps"
    PER_S = "cps"


class Kind(StrEnum):
    """How a panel shows its queries."""

    LINES = "lines"
    STACKED = "stacked"
    NOW = "now"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: queries by legend, all of one unit."""

    title: str
    unit: Unit
    queries: dict[str, str]
    about: str
    kind: Kind = Kind.LINES
    width: int = 8
    max: float | None = None

    def build(self, panel_id: int) -> Builder[models.Panel]:
        """As the foundation SDK has it."""
        made = self._visualisation().id(panel_id)
        made.title(self.title).description(self.about).datasource(DATASOURCE).unit(self.unit).span(self.width)
        made.height(4 if self.kind is Kind.NOW else 8).min(0)
        if self.max is not None:
            made.max(self.max)
        for index, (legend, expression) in enumerate(self.queries.items()):
            made.with_target(self._query(chr(ord("A") + index), legend, expression))
        return made

    def _visualisation(self) -> timeseries.Panel | stat.Panel | table.Panel:
        if self.kind is Kind.NOW:
            newest = common.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().graph_mode(common_models.BigValueGraphMode.AREA).reduce_options(newest)
        if self.kind is Kind.TABLE:
            return table.Panel()
        legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
        legend.placement(common_models.LegendPlacement.BOTTOM)
        lines = timeseries.Panel().fill_opacity(10).legend(legend)
        if self.kind is Kind.STACKED:
            lines.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
        return lines

    def _query(self, ref_id: str, legend: str, expression: str) -> prometheus.Dataquery:
        query = prometheus.Dataquery().ref_id(ref_id).expr(expression).legend_format(legend).datasource(DATASOURCE)
        if self.kind is Kind.TABLE:
            return query.instant().format(PromQueryFormat.TABLE)
        return query.range()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]

    def add_to(self, board: dashboard.Dashboard, ids: Iterator[int]) -> None:
        """Append heading and panels, each under the next id."""
        board.with_row(dashboard.Row(self.title).id(next(ids)))
        for panel in self.panels:
            board.with_panel(panel.build(next(ids)))
