"""
Baselines: limits learned from what healthy machines of one kind measured, under which a device is called slow.

Pure but for the reading and writing of one file. Used by the command line, the node daemon and the aggregator.
"""
