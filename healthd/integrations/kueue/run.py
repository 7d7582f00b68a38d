"""`healthd kueue`, from its start to SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time

from healthd.clients.kubernetes import KubernetesError, api_server
from healthd.core.errors import ConfigError
from healthd.core.http.addresses import aggregators_in
from healthd.core.http.client import Endpoint
from healthd.core.tasks import LogOnce, Tasks, wait_for
from healthd.core.threads import use_daemon_threads
from healthd.integrations.kueue.cluster import KueueCluster
from healthd.integrations.kueue.controller import Controller
from healthd.integrations.kueue.gates import AggregatorGates
from healthd.integrations.kueue.settings import KueueSettings

log = logging.getLogger(__name__)

IDLE_SECONDS = 15.0
"""The longest pause between passes: so late is seen at most that a lease has no Workload any more."""
LEAST_SECONDS = 0.5
"""The shortest: changes come in bursts, and one pass takes them all."""
STOP_SECONDS = 3.0


async def run_kueue(settings: KueueSettings) -> None:
    """Serve until SIGTERM or SIGINT. ConfigError where there is no API server or no usable token."""
    try:
        server = api_server(os.environ, settings.service_account, settings.api_server)
    except ConfigError as error:
        raise ConfigError(f"kueue: {error}") from None
    urls = aggregators_in(settings.aggregator, where="kueue.aggregator")
    endpoint = Endpoint(urls=urls, token=None, ca_file=settings.ca_file, token_file=settings.token_file)
    use_daemon_threads()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cluster, tasks = KueueCluster(server), Tasks()
    gates = AggregatorGates(endpoint)
    try:
        for followed in (cluster.checks, cluster.flavors, cluster.workloads):
            tasks.supervise(f"watch over {followed.resource}", followed.run)
        tasks.supervise("the gates of Workloads", lambda: _passes(cluster, Controller(gates, cluster)))
        log.info("Workloads of Kueue are gated by aggregator %s", settings.aggregator)
        await tasks.first(stop.wait())
    finally:
        await tasks.stop(STOP_SECONDS)


async def _passes(cluster: KueueCluster, controller: Controller) -> None:
    trouble = LogOnce(log)
    while True:
        due = IDLE_SECONDS
        try:
            queues = await cluster.queues()
            if queues is not None:
                due = await controller.run_pass(queues, time.time())
                trouble.clear()
        except KubernetesError as error:
            trouble.say(str(error))
            due = max(2.0, error.retry_after_seconds or 0.0)
        await asyncio.sleep(LEAST_SECONDS)
        await wait_for(cluster.changed, min(IDLE_SECONDS, max(0.0, due if math.isfinite(due) else IDLE_SECONDS)))
