"""Variables that change the bits of the same work, beside those that a device sets or drops itself."""

from __future__ import annotations

from collections.abc import Mapping

NUMERIC_PREFIXES = ("MKL_", "ONEDNN_", "DNNL_", "CUBLAS_", "CUBLASLT_", "ATEN_CPU_CAPABILITY")
"""They choose instructions, kernels and workspaces, and with them the order of sums; probes start without them."""
COMPILER_PREFIXES = ("XLA_FLAGS", "XLA_USE_", "XLA_DOWNCAST_", "NEURON_CC_FLAGS", "NEURON_FUSE_")
"""They choose what is compiled; probes keep them, as a job has them too."""


def numeric_settings(environment: Mapping[str, str]) -> str:
    """A short hash of those that are set; `none` where none is."""
    prefixes = (*NUMERIC_PREFIXES, *COMPILER_PREFIXES)
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(prefixes)]
    if not found:
        return "none"
    import hashlib

    return hashlib.sha256("\n".join(found).encode(errors="replace")).hexdigest()[:8]
