"""
Passive checks of the host, one file a data source: they only read, need no device and never disturb a job.

They run together in one standard-library child; each takes a few milliseconds and none starts a process.
"""
