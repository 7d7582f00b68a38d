"""
Write the dashboards as JSON beside this file: `make dashboards`. A test compares what stands here with what it writes.

Needs grafana-foundation-sdk, which healthd itself does not.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.collectives import collectives
from deploy.grafana.fleet import fleet
from deploy.grafana.node import node

FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Path -> text of each dashboard."""
    return {
        FOLDER / f"{made.uid}.json": json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for made in (fleet(), node(), collectives())
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
