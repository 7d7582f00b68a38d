"""Variables that change the bits of the same work, beside those that a device sets or drops itself."""

from __future__ import annotations

from collections.abc import Mapping

NUMERIC_PREFIXES = ("MKL_", "ONEDNN_", "DNNL_", "CUBLAS_", "CUBLASLT_", "ATEN_CPU_CAPABILITY")
"""They choose instructions, kernels and workspaces, and with them the order of sums."""


def numeric_settings(environment: Mapping[str, str]) -> str:
    """A short hash of those that are set; `none` where none is."""
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(NUMERIC_PREFIXES)]
    if not found:
        return "none"
    import hashlib

    return hashlib.sha256("\n".join(found).encode(errors="replace")).hexdigest()[:8]
