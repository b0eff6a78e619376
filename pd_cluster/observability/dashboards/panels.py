"""Panels and dashboards in few words, and the models of Grafana's SDK that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.models import common, dashboard, units

COUNT, RATE, SECONDS, BYTES = units.Short, units.Number, units.Seconds, units.BytesIEC
BYTES_PER_SECOND, SHARE = units.BytesPerSecondIEC, units.PercentUnit
REQUESTS_PER_SECOND = units.RequestsPerSecond

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24


def metric(name: str, *matchers: str) -> str:
    """A selector of the clusters that were chosen at the dashboard's top."""
    chosen = ", ".join(('cluster=~"$cluster"', *matchers))
    return f"{name}{{{chosen}}}"


def total(name: str, *matchers: str, by: str = "") -> str:
    """A gauge summed up, one series for each value of the labels `by`."""
    return f"{_sum(by)} ({metric(name, *matchers)})"


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def rate(name: str, *matchers: str, by: str = "") -> str:
    """A counter's increase per second, summed up, one series for each value of the labels `by`."""
    return f"{_sum(by)} (rate({metric(name, *matchers)}[$__rate_interval]))"


def quantile(share: float, name: str, *matchers: str, by: str = "") -> str:
    """A histogram's quantile, one series for each value of the labels `by`."""
    labels = ", ".join(each for each in ("le", by) if each)
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', *matchers, by=labels)})"


def ratio(part: str, whole: str) -> str:
    """0 where there is nothing to be a part of."""
    return f"{part} / ({whole} > 0) or {whole} * 0"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`help_text` says what is shown, and what to do when it looks bad."""

    title: str
    unit: str
    help_text: str
    queries: Sequence[Query]
    width: int = 12
    stacked: bool = False
    as_number: bool = False  # the last value only


@dataclass(frozen=True)
class Dashboard:
    name: str
    help_text: str
    panels: Sequence[Panel]

    @property
    def uid(self) -> str:
        return f"pd-cluster-{self.name.lower()}"

    def build(self) -> dashboard.Dashboard:
        board = (
            builders.Dashboard(f"pd-cluster: {self.name}")
            .uid(self.uid)
            .description(self.help_text)
            .tags(["pd-cluster"])
            .readonly()
            .refresh("30s")
            .time("now-1h", "now")
            .timezone("browser")
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(
                builders.DashboardLink("pd-cluster")
                .type(dashboard.DashboardLinkType.DASHBOARDS)
                .tags(["pd-cluster"])
                .keep_time(True)
                .include_vars(True)
            )
            .with_variable(
                builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
            )
            .with_variable(
                builders.QueryVariable("cluster")
                .label("Cluster")
                .datasource(DATASOURCE)
                .query("label_values(pd_workers, cluster)")
                .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
                .multi(True)
                .include_all(True)
            )
        )
        x = y = height = 0
        for panel in self.panels:
            rows = 4 if panel.as_number else 8
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            place = dashboard.GridPos(h=rows, w=panel.width, x=x, y=y)
            board.with_panel(_builder(panel).grid_pos(place))
            x, height = x + panel.width, max(height, rows)
        return board.build()


def _builder(panel: Panel) -> stat.Panel | timeseries.Panel:
    builder = stat.Panel() if panel.as_number else _lines(panel)
    builder.title(panel.title).description(panel.help_text).datasource(DATASOURCE)
    builder.unit(panel.unit).min(0)
    for number, query in enumerate(panel.queries):
        builder.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
            .range()
        )
    return builder


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    if panel.stacked:
        stacking = common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        builder.stacking(stacking.group("A")).fill_opacity(30)
    return builder
