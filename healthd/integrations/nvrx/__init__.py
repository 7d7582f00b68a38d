"""The node health hook of NVIDIA's resiliency extension (NVRx)."""
