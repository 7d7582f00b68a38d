"""Why did my job die? The parent of a job's command, its last words, and what they and measurement say together."""

__all__ = ["EXIT_CODES", "catalogue", "collect", "judge", "notes"]

EXIT_CODES = {"retry elsewhere": 75, "retry here": 76, "do not retry": 70, "stopped": 79}
"""What `healthd run --exit-style verdict` exits with, by the outlook of the verdict."""
