"""The loop that steps gates and commits."""
