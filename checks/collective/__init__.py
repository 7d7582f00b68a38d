"""
Collective operations of a group of ranks, each rank one worker on one device.

`ranks.py` runs them in the workers; `judge.py`, pure, tells from what all ranks said whose fault it was. No torch at
import.
"""
