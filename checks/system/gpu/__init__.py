"""NVIDIA GPUs through NVML; nothing here touches a device."""
