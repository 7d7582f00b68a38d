"""The fleet: its health over time, who is bad and why, gates, what observe mode would have stopped, quarantines."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.parts import (
    HEALTH_COLOURS,
    Annotation,
    Look,
    Panel,
    Query,
    Row,
    label_variable,
    link_variables,
    make,
    source_variable,
)

AGGREGATOR = 'job=~"$aggregator_job"'
NODES = 'job=~"$job",pool=~"$pool"'
RATIO = ((None, "green"), (0.05, "yellow"), (0.1, "red"))
ANY = ((None, "green"), (1.0, "red"))

HEALTH = Row(
    title="Health",
    panels=(
        Panel(
            title="Nodes by health",
            description="What the aggregator knows of each node now. Unknown is not healthy: no gate admits it.",
            queries=(Query(expr=f"sum by (health) (healthd_fleet_nodes{{{AGGREGATOR}}})", legend="{{health}}"),),
            look=Look.STAT,
            width=6,
            colours=HEALTH_COLOURS,
        ),
        Panel(
            title="Health over time",
            description="All nodes that the aggregator knows, by health.",
            queries=(Query(expr=f"sum by (health) (healthd_fleet_nodes{{{AGGREGATOR}}})", legend="{{health}}"),),
            look=Look.STACK,
            colours=HEALTH_COLOURS,
        ),
        Panel(
            title="Unfit nodes",
            description="Share of nodes that are unhealthy or unknown; HealthdFleetDegraded fires above 10%.",
            queries=(Query(expr=f"healthd:fleet_unfit:ratio{{{AGGREGATOR}}}", legend="unfit"),),
            unit="percentunit",
            width=6,
            limits=RATIO,
        ),
        Panel(
            title="Who is bad, and why",
            description="Everything that failed or could not be known. Node and reason lead on.",
            queries=(Query(expr=f'healthd_finding{{{NODES},status=~"fail|unknown"}}'),),
            look=Look.TABLE,
            width=16,
            height=10,
            columns=("node", "pool", "status", "check", "target", "reason", "injected"),
            no_value="Nothing failed, and everything is known.",
        ),
        Panel(
            title="Not reporting, not scraped",
            description="Nodes that the aggregator does not hear, and nodes that Prometheus does not reach.",
            queries=(
                Query(expr=f"healthd:fleet_unheard:count{{{AGGREGATOR}}}", legend="not reporting to the aggregator"),
                Query(expr=f"count(up{{{NODES}}} == 0) or vector(0)", legend="not scraped"),
            ),
            width=8,
            height=10,
            limits=ANY,
        ),
        Panel(
            title="Findings by reason",
            description="Targets that are not healthy, by reason, with warnings.",
            queries=(Query(expr=f"count by (reason) (healthd_finding{{{NODES}}})", legend="{{reason}}"),),
            look=Look.STACK,
            width=24,
        ),
    ),
)

_STATES = ((0, "unhealthy", "red"), (1, "unknown", "purple"), (2, "degraded", "yellow"), (3, "healthy", "green"))
_NUMBERS = " or ".join(
    f'(max by (node) (healthd_node_health{{{NODES},health="{word}"}}) == 1) * 0 + {number}'
    for number, word, _ in _STATES
)
NODE_BY_NODE = Row(
    title="Node by node",
    panels=(
        Panel(
            title="State of each node over time",
            description="Each node's health by its own daemon; a gap is a node that was not scraped.",
            queries=(Query(expr=_NUMBERS, legend="{{node}}"),),
            look=Look.TIMELINE,
            states=_STATES,
            width=24,
            height=12,
        ),
        Panel(
            title="Matrix products, each node against the middle",
            description="The slowest device of a node by the median of its instance type: 100% is as fast as the rest.",
            queries=(Query(expr=f"min by (node) (healthd:device_matmul:ratio{{{NODES}}})", legend="{{node}}"),),
            look=Look.HEAT,
            unit="percentunit",
            limits=((None, "dark-red"), (0.8, "orange"), (0.9, "yellow"), (0.97, "green"), (1.03, "dark-green")),
            height=12,
        ),
        Panel(
            title="Bus bandwidth, each node against the middle",
            description="The slowest collective of a megabyte or more in a node, by the median of its instance type.",
            queries=(
                Query(expr=f"min by (node) (healthd:collective_bus_bandwidth:ratio{{{NODES}}})", legend="{{node}}"),
            ),
            look=Look.HEAT,
            unit="percentunit",
            limits=((None, "dark-red"), (0.8, "orange"), (0.9, "yellow"), (0.97, "green"), (1.03, "dark-green")),
            height=12,
        ),
    ),
)

_DECIDED = f"healthd_gate_decisions_total{{{AGGREGATOR}"
ANNOTATIONS = (
    Annotation(
        name="Gates that rejected",
        expr=f'sum by (decision, reason) (increase({_DECIDED},decision="reject"}}[1m])) > 0',
        colour="red",
    ),
    Annotation(
        name="Nodes that went into quarantine",
        expr=f"max by (node) (healthd_node_quarantined{{{NODES}}} > (healthd_node_quarantined{{{NODES}}} offset 1m))",
        colour="orange",
    ),
    Annotation(
        name="Nodes that came out of quarantine",
        expr=f"max by (node) (healthd_node_quarantined{{{NODES}}} < (healthd_node_quarantined{{{NODES}}} offset 1m))",
        colour="green",
    ),
)

_REJECTS = f'healthd_gate_decisions_total{{{AGGREGATOR},decision="reject"}}'
_WAITS = f"sum by (le) (increase(healthd_gate_duration_seconds_bucket{{{AGGREGATOR}}}[$__range]))"
GATES = Row(
    title="Gates",
    panels=(
        Panel(
            title="Decisions",
            description="Gates decided in each step, by answer.",
            queries=(
                Query(
                    expr="sum by (decision, mode) "
                    f"(increase(healthd_gate_decisions_total{{{AGGREGATOR}}}[$__rate_interval]))",
                    legend="{{decision}} ({{mode}})",
                ),
            ),
            look=Look.STACK,
        ),
        Panel(
            title="Rejected, by reason",
            description="The first reason of each rejected gate.",
            queries=(Query(expr=f"sum by (reason) (increase({_REJECTS}[$__rate_interval]))", legend="{{reason}}"),),
            look=Look.STACK,
        ),
        Panel(
            title="How long jobs wait for the answer",
            description="From the question to the decision on disk, over the time shown.",
            queries=tuple(
                Query(expr=f"histogram_quantile({q}, {_WAITS})", legend=f"{q:.0%} of gates") for q in (0.5, 0.95, 0.99)
            ),
            unit="s",
            width=8,
        ),
        Panel(
            title="Holding now",
            description="Gates that are not decided yet; HealthdGateHoldingLong fires after half an hour.",
            queries=(Query(expr=f"healthd_gates_holding{{{AGGREGATOR}}}", legend="gates"),),
            width=8,
        ),
        Panel(
            title="The longest wait now",
            description="Of the gates that are not decided yet.",
            queries=(Query(expr=f"healthd_gates_holding_oldest_seconds{{{AGGREGATOR}}}", legend="oldest gate"),),
            unit="s",
            width=8,
            limits=((None, "green"), (1800.0, "red")),
        ),
        Panel(
            title="What observe mode would have stopped",
            description="Jobs of the time shown that were admitted by observe mode or by hand, by what enforce says.",
            queries=(
                Query(
                    expr="sum by (would, reason) "
                    f'(increase(healthd_gate_observed_decisions_total{{{AGGREGATOR},would!="admit"}}[$__range]))'
                ),
            ),
            look=Look.TABLE,
            columns=("would", "reason"),
            value="jobs",
            no_value="Nothing: no gate was asked in observe mode, or it would have admitted them all.",
        ),
        Panel(
            title="Nodes left out, by reason",
            description="The first reason for which a decision left a node out.",
            queries=(
                Query(
                    expr=f"sum by (reason) (increase(healthd_nodes_excluded_total{{{AGGREGATOR}}}[$__rate_interval]))",
                    legend="{{reason}}",
                ),
            ),
            look=Look.STACK,
        ),
        Panel(
            title="How right the gate was",
            description="Jobs of the time shown that succeeded although a check had failed on their nodes, and jobs "
            "that their nodes stopped although all had passed. Only jobs that reported their outcome.",
            queries=(
                Query(
                    expr=f"increase(healthd_gate_false_alarms_total{{{AGGREGATOR}}}[$__range])", legend="false alarms"
                ),
                Query(expr=f"increase(healthd_gate_misses_total{{{AGGREGATOR}}}[$__range])", legend="misses"),
            ),
            look=Look.STAT,
        ),
        Panel(
            title="What gates cost",
            description="Devices that were busy with runs ordered by gates.",
            queries=(
                Query(
                    expr=f"rate(healthd_gate_device_seconds_total{{{AGGREGATOR}}}[$__rate_interval])", legend="devices"
                ),
            ),
        ),
    ),
)

QUARANTINE = Row(
    title="Quarantine, overrides and the aggregator itself",
    panels=(
        Panel(
            title="Quarantined nodes",
            description="Nodes kept out of admissions, by owner.",
            queries=(Query(expr=f"healthd_quarantined_nodes{{{AGGREGATOR}}}", legend="by {{owner_kind}}"),),
            look=Look.STACK,
            width=8,
        ),
        Panel(
            title="Who is in quarantine",
            description="As last received by the nodes.",
            queries=(Query(expr=f"healthd_node_quarantined{{{NODES}}} == 1"),),
            look=Look.TABLE,
            width=8,
            columns=("node", "pool", "instance_type"),
            no_value="Nobody.",
        ),
        Panel(
            title="The oldest quarantine",
            description="HealthdQuarantineOld fires after a week.",
            queries=(Query(expr=f"healthd_quarantine_oldest_seconds{{{AGGREGATOR}}}", legend="by {{owner_kind}}"),),
            look=Look.STAT,
            unit="s",
            width=8,
            limits=((None, "green"), (604800.0, "red")),
        ),
        Panel(
            title="What rules came to",
            description="enforced: the node was kept out; observed: it would have been; held: the breaker is open; "
            "shadowed: a person keeps it out already.",
            queries=(
                Query(
                    expr="sum by (rule, mode) "
                    f"(increase(healthd_rule_verdicts_total{{{AGGREGATOR}}}[$__rate_interval]))",
                    legend="{{rule}} {{mode}}",
                ),
            ),
            look=Look.STACK,
            width=8,
        ),
        Panel(
            title="What people should know of",
            description="Open breakers, active overrides, and whether the aggregator recovers.",
            queries=(
                Query(expr=f"healthd_quarantine_breaker_open{{{AGGREGATOR}}}", legend="open breakers"),
                Query(expr=f"healthd_overrides_active{{{AGGREGATOR}}}", legend="overrides"),
                Query(expr=f"healthd_fleet_recovering{{{AGGREGATOR}}}", legend="recovering"),
            ),
            look=Look.STAT,
            width=8,
            limits=ANY,
        ),
        Panel(
            title="Writes to the database that failed",
            description="HealthdStoreFailing fires on any.",
            queries=(
                Query(
                    expr=f"increase(healthd_store_failures_total{{{AGGREGATOR}}}[$__rate_interval])", legend="failures"
                ),
            ),
            width=8,
            limits=ANY,
        ),
    ),
)


def fleet() -> Dashboard:
    """See the module."""
    return make(
        uid="healthd-fleet",
        title="healthd / Fleet",
        description="May jobs start on this fleet, and if not, why not?",
        variables=[
            source_variable(),
            label_variable("aggregator_job", "Aggregator job", "healthd_fleet_nodes", of="job"),
            label_variable("job", "Node job", "healthd_node_health", of="job"),
            label_variable("pool", "Pool", 'healthd_node_health{job=~"$job"}'),
            *link_variables(),
        ],
        rows=(HEALTH, NODE_BY_NODE, GATES, QUARANTINE),
        annotations=ANNOTATIONS,
    )
