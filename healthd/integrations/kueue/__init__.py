"""
Gates in front of the jobs of Kueue: the controller of its AdmissionChecks `healthd.internal/gate`.

It is a client of the aggregator, as a hook is, and keeps nothing of its own: what it has to know after a restart is in
the Workloads, and in the claims that the aggregator lists. What may be written when is decided purely in
`healthd.integrations.kueue.judge`. What the gate itself decides must not enter here.
"""
