"""The only door to the machine: files, programs, clocks, NVML, bounded in time and size."""
