"""All access of checks to the machine: files, programs, clocks, NVML, bounded in time and size."""
