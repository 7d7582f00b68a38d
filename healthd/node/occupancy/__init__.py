"""
Reads the allocations of this host's job schedulers: detects them at each reading and queries all, in bounded time.

    schedulers = Schedulers(settings.allocations, host_root, clock=clock)
    scheduled = await schedulers.look()         # never raises
"""
