"""The loop that steps gates and commits, and what it remembers of what is on disk."""
