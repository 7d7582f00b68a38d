"""AWS Batch: its jobs."""
