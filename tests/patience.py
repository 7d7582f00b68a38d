"""
How long tests wait for what is to happen.

Bounds are written for a quiet machine. A test that passes does not wait for them, so a machine that is slow today gets
several times as much; what is to be quick is asserted by its own measured seconds.
"""

PATIENCE = 5.0
