"""Worker processes: starting, reading, killing and reaping them, and what their events mean."""
