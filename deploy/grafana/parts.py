"""What the three dashboards share: variables, links, and panels in one look. Made with grafana-foundation-sdk."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

RUNBOOKS = "https://git.example.com/healthd/blob/main/docs/runbooks"
"""Where docs/runbooks can be read. Change it in Grafana (the variable `runbooks`), or here before `make dashboards`."""

PAGE = "http://localhost:8090"
"""The aggregator's page for people; the variable `page`."""

Variable = Builder[model.VariableModel]
TAG = "healthd"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEALTH_COLOURS = {"healthy": "green", "degraded": "yellow", "unknown": "purple", "unhealthy": "red"}
STATUS_COLOURS = {"pass": "green", "skip": "text", "warn": "yellow", "unknown": "purple", "fail": "red"}
WIDTH = 24


class Look(enum.Enum):
    """How a panel shows its numbers."""

    LINES = "lines"
    STACK = "stack"
    STAT = "stat"
    TABLE = "table"
    TIMELINE = "timeline"
    """Bands of states over time: a number for each, with a word and a colour by `states`."""
    HEAT = "heat"
    """A row for each series, coloured by its value over time between the limits."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """An expression and what its series are called; of a table only the columns count."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """
    One panel. `unit` is Grafana's name of it. `limits` are (value, colour) from the lowest on; the first one's value is
    None. `columns` are the labels that a table shows, in order, `value` the heading of its number (None: hidden).
    `names` shows what is now by its name instead of its number. `states` are (number, word, colour).
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    look: Look = Look.LINES
    unit: str = "short"
    width: int = 12
    height: int = 8
    limits: tuple[tuple[float | None, str], ...] = ()
    colours: dict[str, str] | None = None
    columns: tuple[str, ...] = ()
    value: str | None = None
    minimum: float | None = 0.0
    no_value: str | None = None
    names: bool = False
    states: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A heading and the panels below it, laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A mark on all panels wherever the expression has a series; its labels say what happened."""

    name: str
    expr: str
    colour: str


def make(
    *,
    uid: str,
    title: str,
    description: str,
    variables: list[Variable],
    rows: tuple[Row, ...],
    annotations: tuple[Annotation, ...] = (),
) -> model.Dashboard:
    """The dashboard; panels are laid out by their widths."""
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .editable()
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
    )
    for one in annotations:
        built = built.annotation(
            dashboard.AnnotationQuery()
            .name(one.name)
            .datasource(SOURCE)
            .enable(True)
            .hide(False)
            .icon_color(one.colour)
            .expr(one.expr)
        )
    for variable in variables:
        built = built.with_variable(variable)
    built = built.link(
        dashboard.DashboardLink("healthd")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )
    for name, url in (("Page of the aggregator", "${page}"), ("Runbooks", "${runbooks}")):
        built = built.link(dashboard.DashboardLink(name).type(model.DashboardLinkType.LINK).url(url).target_blank(True))
    y, number = 0, 0
    for row in rows:
        built = built.with_row(dashboard.Row(row.title).grid_pos(model.GridPos(h=1, w=WIDTH, x=0, y=y)))
        x, y, high = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, high = 0, y + high, 0
            place = model.GridPos(h=panel.height, w=panel.width, x=x, y=y)
            number += 1
            built = built.with_panel(_panel(panel).id(number).grid_pos(place))
            x, high = x + panel.width, max(high, panel.height)
        y += high
    return built.build()


def source_variable() -> dashboard.DatasourceVariable:
    """Which Prometheus."""
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def label_variable(name: str, label: str, series: str, *, of: str | None = None, many: bool = True) -> Variable:
    """A choice among the values of a label (`of`; else the variable's name) of a series."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .query({"query": f"label_values({series}, {of or name})", "refId": "A"})
        .datasource(SOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if many:
        all_of_them = model.VariableOption(selected=True, text="All", value="$__all")
        variable = variable.multi(True).include_all(True).all_value(".*").current(all_of_them)
    return variable


def link_variables() -> list[Variable]:
    """Where links lead."""
    return [
        dashboard.TextBoxVariable("page").label("Aggregator").default_value(PAGE),
        dashboard.TextBoxVariable("runbooks").label("Runbooks").default_value(RUNBOOKS),
    ]


AnyPanel = timeseries.Panel | stat.Panel | table.Panel | statetimeline.Panel | statushistory.Panel


def _panel(panel: Panel) -> AnyPanel:
    built: AnyPanel
    if panel.look is Look.STAT:
        reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
        built = stat.Panel().reduce_options(reduced).color_mode(common_model.BigValueColorMode.VALUE)
        built = built.graph_mode(
            common_model.BigValueGraphMode.NONE if panel.names else common_model.BigValueGraphMode.AREA
        )
        shown = common_model.BigValueTextMode
        built = built.text_mode(shown.NAME if panel.names else shown.VALUE_AND_NAME)
    elif panel.look is Look.TABLE:
        built = _columns(table.Panel().show_header(True), panel)
    elif panel.look is Look.TIMELINE:
        options = {
            str(number): model.ValueMappingResult(text=word, color=colour, index=place)
            for place, (number, word, colour) in enumerate(panel.states)
        }
        built = statetimeline.Panel().mappings([model.ValueMap(options=options)]).merge_values(True).line_width(0)
        built = built.show_value(common_model.VisibilityMode.NEVER)
    elif panel.look is Look.HEAT:
        built = statushistory.Panel().show_value(common_model.VisibilityMode.NEVER).row_height(0.9)
        built = built.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    else:
        built = _lines(timeseries.Panel(), panel)
    built = built.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit)
    if panel.limits:
        steps = [model.Threshold(value=value, color=colour) for value, colour in panel.limits]
        built = built.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.no_value is not None:
        built = built.no_value(panel.no_value)
    for name, colour in (panel.colours or {}).items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        built = built.override_by_name(name, [model.DynamicConfigValue(id_val="color", value=fixed)])
    for number, query in enumerate(panel.queries):
        asked = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        asked = asked.legend_format(query.legend or "__auto")
        if panel.look is Look.TABLE:
            asked = asked.format(PromQueryFormat.TABLE).instant()
        elif panel.names:
            asked = asked.instant()
        else:
            asked = asked.range()
        built = built.with_target(asked)
    return built


def _lines(built: timeseries.Panel, panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(common_model.LegendDisplayMode.TABLE)
        .placement(common_model.LegendPlacement.RIGHT if panel.width > 12 else common_model.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
        .show_legend(True)
    )
    built = built.legend(legend).line_width(1).fill_opacity(10).show_points(common_model.VisibilityMode.NEVER)
    if panel.look is Look.STACK:
        built = built.fill_opacity(60).stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if panel.limits:
        shown = common.GraphThresholdsStyleConfig().mode(common_model.GraphTresholdsStyleMode.DASHED)
        built = built.thresholds_style(shown)
    return built if panel.minimum is None else built.min(panel.minimum)


def _columns(built: table.Panel, panel: Panel) -> table.Panel:
    """Only the labels that are named, in that order; node and reason lead on."""
    keep = [*panel.columns, *(["Value"] if panel.value else [])]
    by_name = {"include": {"names": keep}}
    built = built.with_transformation(model.DataTransformerConfig(id_val="filterFieldsByName", options=by_name))
    order = {name: number for number, name in enumerate(keep)}
    renamed = {"Value": panel.value} if panel.value else {}
    organised = {"indexByName": order, "renameByName": renamed}
    built = built.with_transformation(model.DataTransformerConfig(id_val="organize", options=organised))
    links = {
        "node": ("Node", "/d/healthd-node?var-node=${__value.text}&${__url_time_range}"),
        "reason": ("Runbook", "${runbooks}/reasons.md#${__value.text}"),
    }
    for column, (title, url) in links.items():
        if column in panel.columns:
            leads = [{"title": title, "url": url, "targetBlank": column == "reason"}]
            built = built.override_by_name(column, [model.DynamicConfigValue(id_val="links", value=leads)])
    if "status" in panel.columns or "health" in panel.columns:
        words = {**STATUS_COLOURS, **HEALTH_COLOURS}
        options = {word: {"color": colour, "index": n} for n, (word, colour) in enumerate(words.items())}
        for column in ("status", "health"):
            shown = [
                model.DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": options}]),
                model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
            ]
            built = built.override_by_name(column, shown)
    return built
