"""SIGTERM while Slurm does not answer: the aggregator ends within its promised seconds, and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

from tests.aggregator.cluster import AGGREGATOR, Cluster
from tests.aggregator.hangs_kit import ends_in_time
from tests.aggregator.service import until

SCONTROL = "#!/bin/sh\ntouch {file}\nsleep 600\n"


def test_aggregator_ends_in_time_with_the_scontrol_that_hangs(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        called = tmp_path / "called"
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/scontrol").write_text(SCONTROL.format(file=called))
        (tmp_path / "bin/scontrol").chmod(0o755)
        service = cluster.aggregator(config=AGGREGATOR + '[actuator]\nkind = "slurm"\nmode = "act"\n')
        service.env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        service.start()
        until(called.exists)
        ends_in_time(service, cluster)
