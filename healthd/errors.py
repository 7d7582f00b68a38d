"""
The errors of healthd: one root. A message names the thing, the place and the remedy, in one line.
"""

from __future__ import annotations


class HealthdError(Exception):
    """Root of all errors that healthd raises on purpose."""


class ConfigError(HealthdError):
    """A setting that cannot be used: names file and line, variable or option."""


class BadInputError(HealthdError):
    """Input from outside that cannot be used."""


class StoreError(HealthdError):
    """The database cannot be read or written."""


class UnreachableError(HealthdError):
    """The other side cannot be reached or does not answer."""


class ConflictError(HealthdError):
    """What is asked contradicts what was asked before under the same name."""


class NotFoundError(HealthdError):
    """Nothing of this name is known."""


def words_of(error: Exception) -> str:
    """What the system says of a file, without the number and the path, which the message around it names."""
    return getattr(error, "strerror", None) or str(error)
