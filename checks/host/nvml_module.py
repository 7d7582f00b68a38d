"""
Imports nvidia-ml-py, which is optional, when a check asks for it.

With a root (`checks.host.machine`) the module is `python/pynvml` of that machine, and never the one that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from checks.host.machine import Host

PACKAGE = "nvidia-ml-py"


class NvmlError(Exception):
    """
    NVML as a whole cannot be asked.

    `reason` is a code of `checks.reasons`: MissingTool, NoPermission, VersionMismatch, Timeout or NoData.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def load_module(host: Host) -> Any:
    """The module. Raises NvmlError MissingTool with the remedy."""
    missing = NvmlError(
        "MissingTool",
        f"{PACKAGE} is not installed for {sys.executable}: install it there, or disable the checks gpu_*",
    )
    if host.root is None:
        try:
            return _import_installed()
        except ImportError:
            raise missing from None
    path = host.path("/python/pynvml/__init__.py")
    spec = importlib.util.spec_from_file_location("pynvml_of_the_machine", path)
    if spec is None or spec.loader is None or not host.exists("/python/pynvml/__init__.py"):
        raise missing
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_installed() -> Any:
    """The module from site-packages, without which the child of the passive checks starts (-S). Raises ImportError."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        if not sys.flags.no_site:
            raise
    import site

    site.main()  # what Python does at its start without -S; a virtual environment shows itself here
    importlib.invalidate_caches()
    return importlib.import_module("pynvml")
