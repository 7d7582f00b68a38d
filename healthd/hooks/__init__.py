"""What runs beside a job: launchers, and the hook that needs no standing service."""
