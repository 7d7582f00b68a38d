"""Health events for NVIDIA's NVSentinel."""
