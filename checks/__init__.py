"""
What can be measured on one machine.

Imports the standard library alone (torch and friends inside functions), keeps to Python 3.10,
and never imports healthd: these files also run under a foreign interpreter (`probe_python`).
"""
