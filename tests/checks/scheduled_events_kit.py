"""What the tests of scheduled events, and those beside them, are made with."""

from __future__ import annotations

NOW = 1_548_000_000.0  # 2019-01-20 16:00:00 UTC


# As the EC2 User Guide and aws-node-termination-handler have them.
REBOOT = {
    "NotBefore": "21 Jan 2019 09:00:43 GMT",
    "Code": "system-reboot",
    "Description": "scheduled reboot",
    "EventId": "instance-event-0d59937288b749b32",
    "NotAfter": "21 Jan 2019 09:17:23 GMT",
    "State": "active",
}
