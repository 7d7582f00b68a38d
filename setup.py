"""
Which packages the wheel has; all else is in pyproject.toml.

`checks` is installed inside of `healthd` (see healthd/bundled_checks.py): an environment that healthd shares with a job
may have a package `checks` of its own.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["healthd", "healthd.*"]),
        *(f"healthd.bundled.{name}" for name in find_packages(include=["checks", "checks.*"])),
    ],
    package_dir={"healthd.bundled.checks": "checks"},
)
