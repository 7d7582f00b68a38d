"""
What runs in the child processes of the checks of `checks.storage`: operations on a store, and what their errors mean.

Nothing here changes or deletes what it did not write. Nothing is judged here but errors.
"""
