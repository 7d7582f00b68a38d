"""The text that the training step learns: what healthd is, in its own words. Bytes of ASCII; it never changes."""

from __future__ import annotations

TEXT = """\
healthd answers one question: may this job start on these nodes, now? One bad accelerator, link or host stops
a training job of hundreds of nodes, or slows and corrupts it in silence. healthd runs real tensor operations
on every device and real all-gather, all-reduce and reduce-scatter between them before the job starts, and one
service admits the job, holds it, or rejects it and names the node at fault, also when every node is fine
alone and they fail together.

A check is a pure generator of what it can see. It does not sleep, retry, log or catch broadly. Adding one is
adding a file. One runner starts checks in child processes, bounds them, kills them, and turns anything (an
exception, a time-out, a crash, silence, nonsense) into a result. Not knowing is not health. A pass needs
positive evidence: a number, a time, an expected count. No data, old data, a missing tool, an empty list of
checks: never a pass, and the gate does not admit on it. Decisions are pure and explain themselves: no input,
no output, and the reasons are sentences with node, device, check, number and limit. One snapshot feeds every
outlet. A health check must never hurt a job. When in doubt whether a device is in use, it is in use.

The runner starts one child for the checks of the host, for judging and for looking at the devices, and one
worker per device, so that importing the library and opening a device are paid once. A clock starts when its
worker is ready. Whatever a worker does, the results before it stand, that check is unknown with the last
words of the worker, and the rest runs in a fresh worker. Nobody waits for a pipe that a grandchild may hold,
nor for the corpse of a killed worker.

On processors the same workers become the ranks of the collectives of a node. Each rank says when it has
joined and when it enters and leaves an operation, so a hang or a death has an address: the rank that never
came, or the one that did not enter what the others entered. How long ranks may be silent is learned from runs
that went well.

All nodes of a gate are reserved together, first come first served. Stale evidence is renewed by an order; a
node found bad is left out with its reasons; a job is admitted only when every node has stored its lease and
the decision is on disk. The same job and attempt asked again gets the same answer. After a restart gates hold
until nodes could report. A store that fails is an error, never a guess. What one node claims counts for that
node alone.
"""
