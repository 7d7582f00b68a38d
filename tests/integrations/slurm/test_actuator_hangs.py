"""SIGTERM while scontrol does not answer: the aggregator ends within its promised seconds, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.integrations.slurm.scontrol import Scontrol, SlurmError
from tests.aggregator.cluster import AGGREGATOR, Cluster
from tests.aggregator.ends_kit import ends_in_time
from tests.aggregator.service import until

SCONTROL = "#!/bin/sh\ntouch {file}\nexec sleep 600\n"


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """A file that is there once `bin/scontrol`, which hangs, was called."""
    file = tmp_path / "called"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(SCONTROL.format(file=file))
    (tmp_path / "bin/scontrol").chmod(0o755)
    return file


def test_aggregator_ends_in_time_with_the_scontrol_that_hangs(tmp_path: Path, called: Path) -> None:
    with Cluster(tmp_path) as cluster:
        service = cluster.aggregator(config=AGGREGATOR + '[actuator]\nkind = "slurm"\nmode = "act"\n')
        service.env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        service.start()
        until(called.exists)
        ends_in_time(service, cluster)


def test_a_call_that_is_out_of_time_is_an_error_that_says_so(tmp_path: Path, called: Path) -> None:
    with pytest.raises(SlurmError, match="did not respond"):
        Scontrol(str(tmp_path / "bin/scontrol"), timeout_seconds=0.2).nodes()
    assert called.exists()


async def test_the_actuator_is_a_supervised_task(tmp_path: Path) -> None:
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
    async with aggregator(settings, Policy(), actuator=ActuatorSettings(kind="slurm")) as (_, tasks):
        async with asyncio.timeout(30):
            while "actuator" not in tasks.errors:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
