"""
Getting bad nodes out of the way of the scheduler that places jobs: a taint, a drain. Off unless it is configured.

`desired` says, purely, which nodes are to be out; `hand` makes it so, bounded and slowly; one module for each scheduler
says how (`model.Actuator` is what it implements, `make(settings) -> Actuator` how it is built). What judges nodes, and
what a gate decides, must not enter here.
"""
