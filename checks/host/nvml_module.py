"""
Imports nvidia-ml-py, which is optional, when a check asks for it: from the interpreter of the probes, else from beside
healthd, so that the extra `nvidia` of the service is enough and an interpreter of jobs need not be changed.

With a root (`checks.host.machine`) the module is `python/pynvml` of that machine, and never the one that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
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
        f"{PACKAGE} is neither installed beside healthd nor for {sys.executable}: install the extra nvidia of healthd "
        "(pip install '.[nvidia]' in a clone), or disable the checks gpu_*",
    )
    if host.root is None:
        try:
            return _import_installed()
        except ImportError:
            if (beside := _import_beside_healthd()) is not None:
                return beside
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


def _import_beside_healthd() -> Any:
    """
    The module from the site-packages that healthd itself is installed in, None where it is not there.

    It is one file of pure Python, so that any interpreter can load it. A wheel has this file in
    `healthd/bundled/checks/host`.
    """
    folder = Path(__file__).resolve().parent
    if folder.parts[-4:] != ("healthd", "bundled", "checks", "host"):
        return None
    path = folder.parents[3] / "pynvml.py"
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module  # where it looks for itself
    spec.loader.exec_module(module)
    return module
