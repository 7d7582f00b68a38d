"""Collectives: bus bandwidth by operation, size and node against the middle of the fleet; stragglers; validations."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.parts import Look, Panel, Query, Row, label_variable, link_variables, make, source_variable

NODES = 'job=~"$job",pool=~"$pool",node=~"$node"'
WHICH = f'{NODES},op=~"$op",size_bytes=~"$size_bytes"'
ALL = 'job=~"$job",op=~"$op",size_bytes=~"$size_bytes"'
REASONS = "CollectiveMismatch|CollectiveFailed|RankAbsent|RankHung|RankDied|SlowLink|CollectiveFault|SlowNode|PathFault"
SLOW = ((None, "red"), (0.8, "green"))

BANDWIDTH = Row(
    title="Bus bandwidth inside each node",
    panels=(
        Panel(
            title="By node",
            description="Bus bandwidth of the last run, by the nccl-tests definition.",
            queries=(
                Query(
                    expr=f"healthd_collective_bus_bandwidth_bytes_per_second{{{WHICH}}}",
                    legend="{{node}} {{op}} {{size_bytes}} B",
                ),
            ),
            unit="Bps",
            width=24,
            height=9,
        ),
        Panel(
            title="The middle of the fleet",
            description="Median over the nodes of one instance type, of sizes from a megabyte on.",
            queries=(
                Query(
                    expr=f"healthd:collective_bus_bandwidth_bytes_per_second:median{{{ALL}}}",
                    legend="{{instance_type}} {{op}} {{size_bytes}} B",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Each node against the middle",
            description="HealthdCollectiveSlow fires below 80% where at least five nodes are compared.",
            queries=(
                Query(
                    expr=f"healthd:collective_bus_bandwidth:ratio{{{WHICH}}}", legend="{{node}} {{op}} {{size_bytes}} B"
                ),
            ),
            unit="percentunit",
            limits=SLOW,
        ),
        Panel(
            title="Bus bandwidth by size",
            description="The last run of each operation and size.",
            queries=(Query(expr=f"healthd_collective_bus_bandwidth_bytes_per_second{{{WHICH}}}"),),
            look=Look.TABLE,
            unit="Bps",
            columns=("node", "op", "size_bytes"),
            value="busbw",
        ),
        Panel(
            title="Duration",
            description="Time of one operation in the last run.",
            queries=(
                Query(
                    expr=f"healthd_collective_duration_seconds{{{WHICH}}}", legend="{{node}} {{op}} {{size_bytes}} B"
                ),
            ),
            unit="s",
        ),
    ),
)

STRAGGLERS = Row(
    title="Stragglers",
    panels=(
        Panel(
            title="Slowest nodes in collectives",
            description="The ten worst against the median of their instance type.",
            queries=(Query(expr=f"bottomk(10, healthd:collective_bus_bandwidth:ratio{{{WHICH}}})"),),
            look=Look.TABLE,
            unit="percentunit",
            columns=("node", "op", "size_bytes"),
            value="of the median",
        ),
        Panel(
            title="Slowest devices in matrix products",
            description="The ten worst against the median of their instance type.",
            queries=(Query(expr=f"bottomk(10, healthd:device_matmul:ratio{{{NODES}}})"),),
            look=Look.TABLE,
            unit="percentunit",
            columns=("node", "device", "dtype"),
            value="of the median",
        ),
        Panel(
            title="What collectives found inside nodes",
            description="Findings of collectives now; the reason leads to what to do.",
            queries=(Query(expr=f'healthd_finding{{{NODES},reason=~"{REASONS}"}}'),),
            look=Look.TABLE,
            columns=("node", "status", "check", "target", "reason", "injected"),
            no_value="Nothing.",
        ),
        Panel(
            title="Nodes that validations left out",
            description="Nodes that gates left out for what collectives between nodes found, in the time shown.",
            queries=(
                Query(
                    expr=f'sum by (reason) (increase(healthd_nodes_excluded_total{{reason=~"{REASONS}"}}[$__range]))'
                ),
            ),
            look=Look.TABLE,
            columns=("reason",),
            value="nodes",
            no_value="None.",
        ),
    ),
)

VALIDATIONS = Row(
    title="Validations between nodes",
    panels=(
        Panel(
            title="Validations",
            description="Collective tests over several nodes in each step.",
            queries=(
                Query(
                    expr="increase(healthd_validation_duration_seconds_count[$__rate_interval])", legend="validations"
                ),
            ),
        ),
        Panel(
            title="How long they take",
            description="Localisation included, over the time shown.",
            queries=tuple(
                Query(
                    expr=f"histogram_quantile({q}, "
                    "sum by (le) (increase(healthd_validation_duration_seconds_bucket[$__range])))",
                    legend=f"{q:.0%} of validations",
                )
                for q in (0.5, 0.95)
            ),
            unit="s",
        ),
    ),
)


def collectives() -> Dashboard:
    """See the module."""
    series = 'healthd_collective_bus_bandwidth_bytes_per_second{job=~"$job"}'
    return make(
        uid="healthd-collectives",
        title="healthd / Collectives",
        description="Which node is slower than its peers, in which operation and size?",
        variables=[
            source_variable(),
            label_variable("job", "Node job", "healthd_node_health", of="job"),
            label_variable("pool", "Pool", 'healthd_node_health{job=~"$job"}'),
            label_variable("node", "Node", 'healthd_node_health{job=~"$job",pool=~"$pool"}'),
            label_variable("op", "Operation", series),
            label_variable("size_bytes", "Size", series),
            *link_variables(),
        ],
        rows=(BANDWIDTH, STRAGGLERS, VALIDATIONS),
    )
