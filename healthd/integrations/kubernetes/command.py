"""`healthd kubernetes clean`: what the uninstallation from a cluster runs, in a pod of the cluster."""

from __future__ import annotations

import asyncio
import os

import click

from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.cli.fleet.line import duration_of
from healthd.cli.terminal.output import told
from healthd.clients.kubernetes import api_server
from healthd.core.errors import ConfigError
from healthd.integrations.kubernetes.clean import Traces, clean
from healthd.integrations.kubernetes.settings import KubernetesActuatorSettings


@click.group(short_help="Uninstall from a Kubernetes cluster: clean.")
def kubernetes() -> None:
    """Maintenance inside a Kubernetes cluster."""


@kubernetes.command(name="clean", short_help="Remove everything that healthd has written to the cluster's nodes.")
@click.option("--condition", "conditions", multiple=True, metavar="TYPE", help="A condition to remove; repeatable.")
@click.option(
    "--owner", metavar="NAME", help="Remove the taints, labels, annotations and rules of this actuator's owner."
)
@click.option(
    "--taint-key", metavar="KEY", default=KubernetesActuatorSettings.taint_key, show_default=True, help="Taint key."
)
@click.option("--label", "labels", multiple=True, metavar="KEY", help="A label to remove; repeatable.")
@click.option("--namespace", metavar="NAME", required=True, help="Namespace of the installation's pods.")
@click.option(
    "--pods",
    multiple=True,
    metavar="SELECTOR",
    help="Labels of the installation's pods, which must end first; repeatable.",
)
@click.option(
    "--wait", metavar="T", default="60s", show_default=True, help="Maximum time to wait for these pods to end."
)
def clean_command(
    conditions: tuple[str, ...],
    owner: str | None,
    taint_key: str,
    labels: tuple[str, ...],
    namespace: str,
    pods: tuple[str, ...],
    wait: str,
) -> int:
    """
    Remove the conditions, the actuator's taints, labels and annotations, and further labels from the cluster's nodes,
    and the actuator's rules for single devices.

    Run it in a pod whose service account may get, list and patch nodes, patch nodes/status, list pods, and list and
    delete devicetaintrules.resource.k8s.io. The chart runs it after `helm uninstall`; with kustomize, apply
    deploy/kubernetes/uninstall. A condition stays on nodes where the node daemon of another installation runs.
    """
    if not conditions and not labels and owner is None:
        raise ConfigError("nothing to remove: name --condition TYPE, --owner NAME, --label KEY, or several of them")
    try:
        ActuatorSettings(owner=owner or ActuatorSettings.owner)
        settings = KubernetesActuatorSettings(taint_key=taint_key)
    except ValueError as error:
        option, _, words = str(error).partition(": ")
        raise ConfigError(f"--{option.replace('_', '-')}: {words}") from None
    traces = Traces(conditions=conditions, labels=labels, key=taint_key, owner=owner, namespace=namespace, pods=pods)
    server = api_server(os.environ, settings.service_account)
    seconds = duration_of("--wait", wait) or 0.0
    with told(needed=False):
        for line in asyncio.run(clean(server, traces, wait_seconds=seconds)):
            click.echo(line)
    return 0
