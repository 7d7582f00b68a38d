"""A stop-watch on the documented ways from nothing to a gated job: `python -m tests.first_hour`."""
