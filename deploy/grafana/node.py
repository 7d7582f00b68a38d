"""One node: its checks, devices, readings and history."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.parts import (
    HEALTH_COLOURS,
    STATUS_COLOURS,
    Look,
    Panel,
    Query,
    Row,
    label_variable,
    link_variables,
    make,
    source_variable,
)

NODE = 'job=~"$job",node="$node"'

NOW = Row(
    title="Now",
    panels=(
        Panel(
            title="Health",
            description="What the node's daemon says of it.",
            queries=(Query(expr=f"healthd_node_health{{{NODE}}} == 1", legend="{{health}}"),),
            look=Look.STAT,
            width=6,
            height=6,
            colours=HEALTH_COLOURS,
            names=True,
        ),
        Panel(
            title="Allocated, quarantined, injected faults",
            description="Whether a job has the devices or may have, whether gates leave the node out, and fire drills.",
            queries=(
                Query(expr=f"healthd_node_allocated{{{NODE}}}", legend="allocated"),
                Query(expr=f"healthd_node_quarantined{{{NODE}}}", legend="quarantined"),
                Query(expr=f"healthd_injected_faults{{{NODE}}}", legend="injected faults"),
            ),
            look=Look.STAT,
            width=8,
            height=6,
        ),
        Panel(
            title="What it is",
            description="Instance, accelerator, and the pool that it belongs to.",
            queries=(Query(expr=f"healthd_node_info{{{NODE}}}"),),
            look=Look.TABLE,
            width=10,
            height=6,
            columns=("node", "instance_id", "instance_type", "accelerator", "pool"),
        ),
        Panel(
            title="Unhealthy targets",
            description="The findings behind the health, at most 48; the reason leads to what to do.",
            queries=(Query(expr=f"healthd_finding{{{NODE}}}"),),
            look=Look.TABLE,
            columns=("status", "check", "target", "reason", "injected"),
            no_value="Nothing.",
        ),
        Panel(
            title="Checks",
            description="The status of the last run of each check.",
            queries=(Query(expr=f"healthd_check_status{{{NODE}}} == 1"),),
            look=Look.TABLE,
            columns=("check", "status"),
        ),
    ),
)

HISTORY = Row(
    title="History",
    panels=(
        Panel(
            title="Health",
            description="1 for the health that the node had.",
            queries=(Query(expr=f"healthd_node_health{{{NODE}}}", legend="{{health}}"),),
            look=Look.STACK,
            colours=HEALTH_COLOURS,
        ),
        Panel(
            title="Findings",
            description="Targets that were not healthy, by check and reason.",
            queries=(
                Query(expr=f"count by (check, reason) (healthd_finding{{{NODE}}})", legend="{{check}} {{reason}}"),
            ),
            look=Look.STACK,
        ),
        Panel(
            title="Age of evidence",
            description="Since each check last ran. While a job has the devices that of active checks is suspended: it "
            "grows and does not expire.",
            queries=(Query(expr=f"time() - healthd_check_last_run_timestamp_seconds{{{NODE}}}", legend="{{check}}"),),
            unit="s",
        ),
        Panel(
            title="Duration of checks",
            description="Of the last run.",
            queries=(Query(expr=f"healthd_check_duration_seconds{{{NODE}}}", legend="{{check}}"),),
            unit="s",
        ),
        Panel(
            title="Runs by result",
            description="Runs of checks in each step.",
            queries=(
                Query(
                    expr=f"sum by (status) (increase(healthd_check_runs_total{{{NODE}}}[$__rate_interval]))",
                    legend="{{status}}",
                ),
            ),
            look=Look.STACK,
            colours=STATUS_COLOURS,
        ),
        Panel(
            title="What healthd costs here",
            description="Devices that were busy with active checks, and what compiling took in the last runs.",
            queries=(
                Query(expr=f"rate(healthd_probe_device_seconds_total{{{NODE}}}[$__rate_interval])", legend="devices"),
                Query(expr=f"healthd_compile_duration_seconds{{{NODE}}}", legend="seconds of compiling"),
            ),
        ),
    ),
)

DEVICES = Row(
    title="Devices",
    panels=(
        Panel(
            title="Matrix products",
            description="Achieved in the last run, by device and type.",
            queries=(Query(expr=f"healthd_device_matmul_flops_per_second{{{NODE}}}", legend="{{device}} {{dtype}}"),),
            unit="flops",
        ),
        Panel(
            title="Matrix products against the fleet",
            description="Each device against the median of its instance type; HealthdDeviceSlow fires below 90%.",
            queries=(Query(expr=f"healthd:device_matmul:ratio{{{NODE}}}", legend="{{device}} {{dtype}}"),),
            unit="percentunit",
            limits=((None, "red"), (0.9, "green")),
        ),
        Panel(
            title="Memory bandwidth",
            description="Achieved in the last run, by device.",
            queries=(Query(expr=f"healthd_device_memory_bandwidth_bytes_per_second{{{NODE}}}", legend="{{device}}"),),
            unit="Bps",
        ),
        Panel(
            title="Collectives between the devices",
            description="Bus bandwidth by operation and size.",
            queries=(
                Query(
                    expr=f"healthd_collective_bus_bandwidth_bytes_per_second{{{NODE}}}",
                    legend="{{op}} {{size_bytes}} B",
                ),
            ),
            unit="Bps",
        ),
    ),
)


def _readings(title: str, names: str, unit: str, *, other: bool = False) -> Panel:
    match = "!~" if other else "=~"
    return Panel(
        title=title,
        description="What passive checks read last: the worst over their targets.",
        queries=(
            Query(
                expr=f'healthd_reading{{{NODE},measurement{match}"{names}"}}',
                legend="{{check}} {{measurement}}",
            ),
        ),
        unit=unit,
        minimum=None,
    )


READINGS = Row(
    title="Counters and readings",
    panels=(
        _readings("Counters and other numbers", ".*_(ratio|bytes|seconds)", "short", other=True),
        _readings("Shares", ".*_ratio", "percentunit"),
        _readings("Bytes", ".*_bytes", "bytes"),
        _readings("Times", ".*_seconds", "s"),
    ),
)


def node() -> Dashboard:
    """See the module."""
    return make(
        uid="healthd-node",
        title="healthd / Node",
        description="What is known of one node, since when, and why.",
        variables=[
            source_variable(),
            label_variable("job", "Node job", "healthd_node_health", of="job"),
            label_variable("pool", "Pool", 'healthd_node_health{job=~"$job"}'),
            label_variable("node", "Node", 'healthd_node_health{job=~"$job",pool=~"$pool"}', many=False),
            *link_variables(),
        ],
        rows=(NOW, DEVICES, READINGS, HISTORY),
    )
