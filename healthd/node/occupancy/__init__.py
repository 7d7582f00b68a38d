"""
Reads the allocations of the job schedulers of this host: finds them anew at each look, asks all, in bounded time.

    schedulers = Schedulers(settings.allocations, host_root, clock=clock)
    scheduled = await schedulers.look()         # never raises
"""
