"""The daemon of one node: runs its checks, serves its state, and synchronizes it with the aggregator."""

__all__ = [
    "checks.catalogue",
    "clock",
    "daemon",
    "http.control_socket",
    "http.health",
    "occupancy.model",
    "occupancy.occupancy",
    "occupancy.own",
    "occupancy.watching",
    "protobuf",
    "services",
    "settings",
    "state.saving",
    "state.store",
]
