"""Prints the Grafana dashboard as JSON: `python helm/dashboard > helm/ottserve/files/dashboard.json`."""

from __future__ import annotations

import itertools

from cache_rows import KV_MEMORY, OUTLIERS, PREFIX_CACHE
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from panels import DATASOURCE
from replica_rows import AUTOSCALING, REPLICAS
from traffic_rows import LATENCY, OVERVIEW, THROUGHPUT

ROWS = (OVERVIEW, LATENCY, THROUGHPUT, KV_MEMORY, OUTLIERS, PREFIX_CACHE, AUTOSCALING, REPLICAS)


def build() -> dashboard.Dashboard:
    """The whole dashboard."""
    board = dashboard.Dashboard("ottserve").uid("ottserve").tags(["ottserve"]).refresh("30s").time("now-1h", "now")
    board.tooltip(models.DashboardCursorSync.CROSSHAIR).timezone("browser").readonly()
    board.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    board.with_variable(_choice("job", "Service", "label_values(ottserve_gateway_requests_received_total, job)"))
    board.with_variable(
        _choice("instance", "Replica", 'label_values(ottserve_running_requests{job=~"$job"}, instance)')
    )
    ids = itertools.count(1)
    for row in ROWS:
        row.add_to(board, ids)
    return board


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(DATASOURCE)
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.ALPHABETICAL_ASC)
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


if __name__ == "__main__":
    print(JSONEncoder(sort_keys=True, indent=1).encode(build().build()))
