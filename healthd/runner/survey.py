"""Makes surveys of the machine from the answers of the node's worker."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.worker.faults import Fault, without_missing
from healthd.core.model import DeviceRecord, Inventory
from healthd.runner.settings import Survey
from healthd.runner.workers.outcome import Outcome

NO_INVENTORY = Inventory(
    accelerator="unknown", device_count=None, core_count=None, memory_bytes=None, efa_count=None, devices=()
)


class SeenDevices:
    """
    Since when each device is there as it is now: not gone, swapped or reset meanwhile.

    A survey that could not tell which devices there are says nothing. What comes and goes between two surveys is seen
    where its device file was made anew, or where a check reports the reset (`note_resets`).
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._looked_at = 0.0
        self._resets: dict[str, float] | None = None  # None: nobody has looked for resets yet

    def note(self, answer: Mapping[str, Any]) -> None:
        """Take in the answer to a survey."""
        inventory, looked_at = answer["inventory"], answer["looked_at"]
        if inventory["device_count"] is None or looked_at < self._looked_at:
            return
        self._looked_at = looked_at
        seen = {}
        for device in inventory["devices"]:
            now = _Seen(serial=device.get("serial"), file=device.get("file"), since=looked_at)
            seen[device["target"]] = now.after(self._seen.get(device["target"]))
        self._seen = seen

    def note_resets(self, data: Mapping[str, Any], at: float) -> None:
        """
        Take in the evidence DEVICE_RESETS of a look that began at `at` (CLOCK_BOOTTIME).

        A reset that the look before did not see counts from this look, and one that the first look sees from when it
        was, because the clock of the kernel log drifts from ours over weeks.
        """
        resets = {str(target): float(seconds) for target, seconds in data["resets"].items()}
        for target, seconds in resets.items():
            device = self._seen.get(target)
            if device is None:
                continue
            if self._resets is None:
                device.since = max(device.since, at - max(0.0, float(data["now"]) - seconds))
            elif seconds > self._resets.get(target, -math.inf):
                device.since = max(device.since, at)
        self._resets = {**(self._resets or {}), **resets}

    def restore(self, devices: Iterable[DeviceRecord]) -> None:
        """Go on from what an earlier daemon has seen in this boot."""
        for device in devices:
            if device.since is not None:
                self._seen.setdefault(device.target, _Seen(serial=device.serial, file=None, since=device.since))

    def stamp(self, device: DeviceRecord) -> DeviceRecord:
        """The device with the time since when it is there as it is now; None where it was not seen."""
        seen = self._seen.get(device.target)
        return dataclasses.replace(device, since=seen.since if seen is not None else None)


@dataclass(kw_only=True)
class _Seen:
    """A device as it was seen. `file` is the inode of its device file; None where there is none or it is not known."""

    serial: str | None
    file: int | None
    since: float

    def after(self, before: _Seen | None) -> _Seen:
        """A new device, or the one that was seen before, of which no less is known now."""
        if before is None or _differ(before.serial, self.serial) or _differ(before.file, self.file):
            return self
        return _Seen(serial=self.serial or before.serial, file=self.file or before.file, since=before.since)


def _differ(before: object, now: object) -> bool:
    return None not in (before, now) and before != now


def to_survey(outcome: Outcome, versions: Mapping[str, str], lost: Sequence[Fault], seen: SeenDevices) -> Survey:
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
    seen.note(answer)
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
                seen.stamp(
                    DeviceRecord(**{field.name: device.get(field.name) for field in dataclasses.fields(DeviceRecord)})
                )
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
