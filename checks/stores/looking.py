"""Looks at a store without writing or reading a file: that it answers, may be used and has room. In the child."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from checks.stores.errors import StoreFault
from checks.stores.operations import Store
from checks.stores.report import Report


def look(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """`order`: writable, whether jobs save there."""
    begun = time.perf_counter()
    report.step("look at the file system")
    found = os.statvfs(store.root)
    report.step("list the directory")
    with os.scandir(store.root) as entries:
        next(entries, None)
    if order["writable"]:
        report.step("look whether it may be written")
        if found.f_flag & os.ST_RDONLY:
            raise StoreFault("StoreReadOnly", "it is mounted read-only, and jobs save there")
        if not os.access(store.root, os.W_OK | os.X_OK, effective_ids=True):
            raise StoreFault("StoreNoPermission", "its mode does not let the user write")
        if found.f_blocks and not found.f_bavail:
            raise StoreFault("StoreNoSpace", "no space is left to its users")
        if found.f_files and not found.f_favail:
            raise StoreFault("StoreNoInodes", "no inodes are left to its users: too many files")
        report.reading("store_available_bytes", float(found.f_bavail * found.f_frsize))
        if found.f_files:
            report.reading("store_available_inodes_ratio", found.f_favail / found.f_files)
    report.reading("store_answer_seconds", time.perf_counter() - begun)
