"""The hook that needs no standing service: what runs in each process of the job, and its sidecar."""
