"""AWS Batch: its jobs, and the machines that they run on."""
