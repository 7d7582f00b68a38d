"""The player does what the real Kueue did: each step of each recording is one of its moves, or the script's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.every import every
from tests.integrations.kueue import player

FOLDER = Path(__file__).parent / "recordings"
RECORDINGS = sorted(FOLDER.glob("*.jsonl"))
# What scripts wrote as the controller of the check.
WRITTEN = ("Ready", "Retry", "Rejected")


def told(found: dict[str, Any]) -> dict[str, Any]:
    """What of a Workload matters to the controller of a check."""
    status = found.get("status", {})
    return {
        "active": found["spec"].get("active"),
        "deleted": "deletionTimestamp" in found["metadata"],
        "conditions": {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions", ())},
        "checks": {
            one["name"]: (one["state"], one.get("retryCount"), json.dumps(one.get("podSetUpdates")))
            for one in status.get("admissionChecks", ())
        },
        "reset": [one["message"] for one in status.get("admissionChecks", ()) if one["state"] == "Pending"],
        "admission": "admission" in status,
        "pause": status.get("requeueState", {}).get("requeueAt"),
        "evictions": sum(one["count"] for one in status.get("schedulingStats", {}).get("evictions", ())),
        "held": bool(found["metadata"].get("finalizers")),
    }


def by_the_script(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a step is what the script did: a state of the check, `spec.active`, or the deletion of the Job."""
    old, new = told(before), told(after)
    if new["deleted"]:
        return True
    changed = {key for key in old if old[key] != new[key]}
    state = player.check_of(after).get("state")
    rejected = player.holds(before, "DeactivationTarget")
    return (changed <= {"checks", "reset"} and state in WRITTEN) or (changed == {"active"} and not rejected)


@every("recording", RECORDINGS)
def test_every_step_that_kueue_took_is_a_move_of_the_player(recording: Path) -> None:
    last: dict[str, dict[str, Any]] = {}
    taken = []
    for line in recording.read_text().splitlines():
        event = json.loads(line)
        after = event["object"]
        name = after["metadata"]["name"]
        before = last.get(name)
        last[name] = after
        if before is None or told(before) == told(after) or by_the_script(before, after):
            continue
        made = player.moves(before, event["t"], quota=True) | player.moves(before, event["t"], quota=False)
        found = [move for move, result in made.items() if told(result) == told(after)]
        assert found, f"{name}: {told(before)} -> {told(after)}: none of {list(made)}"
        taken += found
    assert "reserve" in taken or "evict for Retry" in taken


def test_all_ten_recordings_are_there() -> None:
    assert len(RECORDINGS) == 10
