"""Makes surveys of the machine from the answers of the node's worker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from checks.worker.faults import Fault, without_missing
from healthd.core.model import DeviceRecord, Inventory
from healthd.runner.settings import Survey
from healthd.runner.workers.outcome import Outcome

NO_INVENTORY = Inventory(
    accelerator="unknown", device_count=None, core_count=None, memory_bytes=None, efa_count=None, devices=()
)


def to_survey(outcome: Outcome, versions: Mapping[str, str], lost: Sequence[Fault]) -> Survey:
    """A survey from the answer of a worker, without the devices that faults `lost`; all unknown without an answer."""
    if outcome.missing is not None or not outcome.answers:
        failed = outcome.missing.message if outcome.missing else "no answer"
        return Survey(
            inventory=NO_INVENTORY,
            boot_id=None,
            instance_id=None,
            instance_type=None,
            versions=dict(versions),
            holders=None,
            looked_at=time.clock_gettime(time.CLOCK_BOOTTIME) - max(0.0, time.monotonic() - outcome.began),
            failed=failed,
            raw={"error": failed},
        )
    answer = outcome.answers[0]
    plain = without_missing(answer["inventory"], lost)
    holders = answer["holders"]
    return Survey(
        inventory=Inventory(
            accelerator=plain["accelerator"],
            device_count=plain["device_count"],
            core_count=plain["core_count"],
            memory_bytes=plain["memory_bytes"],
            efa_count=plain["efa_count"],
            devices=tuple(
                DeviceRecord(**{field.name: device.get(field.name) for field in dataclasses.fields(DeviceRecord)})
                for device in plain["devices"]
            ),
            workers=tuple(plain.get("workers") or ()),
        ),
        boot_id=answer["boot_id"],
        instance_id=answer["instance_id"],
        instance_type=answer["instance_type"],
        versions={**versions, **answer["versions"]},
        holders=None if holders is None else tuple(holders),
        looked_at=answer["looked_at"],
        raw={key: value for key, value in answer.items() if key not in ("kind", "id", "looked_at")},
    )
