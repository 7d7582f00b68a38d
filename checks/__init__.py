"""
What can be measured on one machine.

Imports the standard library alone (torch and friends inside functions), keeps to Python 3.10,
and never imports healthd: these files also run under a foreign interpreter (`probe_python`).
"""

__all__ = [
    "accelerators",
    "accelerators.neuron.versions",
    "atomic_file",
    "collective.judge",
    "collective.judges",
    "collective.nccom.launch",
    "collective.nccom.run",
    "collective.nccom.steps",
    "collective.training.shard",
    "compile_cache",
    "contract",
    "device.probes",
    "discover",
    "durations",
    "host.container",
    "host.descendants",
    "host.guard",
    "host.identity",
    "host.machine",
    "host.metadata",
    "host.python_packages",
    "host.running",
    "json_text",
    "limits",
    "peers",
    "printable",
    "reasons",
    "system.kernel_log",
    "system.scheduled_events",
    "training.digests",
    "training.environment",
    "words",
    "worker.faults",
    "worker.profiles",
    "worker.protocol",
]
