"""
Checks of where a job saves and reads: file systems and object stores.

Everything that touches a store runs in a child process (`checks.stores`), which can be killed when the store hangs.
"""
