"""Ends of jobs, as CloudEvents to a URL."""
