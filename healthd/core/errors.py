"""
The errors of healthd: one root. A message names the thing, the place and the remedy, in one line.
"""

from __future__ import annotations

import re

# What a library says of a connection that failed -> what to do about it.
_CONNECTION_REMEDIES = (
    (
        ("self-signed certificate", "self signed certificate", "unable to get local issuer"),
        "name its CA with --ca-file or HEALTHD_CA_FILE",
    ),
    (("certificate is not valid for", "Hostname mismatch"), "use a name that is in its certificate"),
    (("certificate has expired",), "renew its certificate, and restart it"),
    (("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "record layer failure"), "it does not speak TLS: use http://"),
    (
        ("Server disconnected without sending", "Remote end closed connection without response"),
        "if it speaks TLS, use https://",
    ),
    (
        ("Connection refused", "All connection attempts failed"),
        "nothing listens there: start it, or correct the address",
    ),
    (
        ("Name or service not known", "No address associated", "name resolution"),
        "correct the name, or add it to DNS or /etc/hosts",
    ),
    (("No route to host", "Network is unreachable"), "correct the address, or check routes and firewalls"),
    (("timed out",), "check that it runs and that no firewall drops the traffic"),
)


class HealthdError(Exception):
    """Root of all errors that healthd raises on purpose. As text it shows no secrets, such as a password in a URL."""

    def __str__(self) -> str:
        from healthd.core.redaction import redact

        return redact(super().__str__())


class ConfigError(HealthdError):
    """A setting that cannot be used: names file and line, variable or option."""


class BadInputError(HealthdError):
    """Input from outside that cannot be used."""


class StoreError(HealthdError):
    """The database cannot be read or written."""


class UnreachableError(HealthdError):
    """The other side cannot be reached or does not answer."""


class OutputError(HealthdError):
    """What a command has to tell cannot be written: to standard output, or to the file that was named for it."""


class LimitError(HealthdError):
    """The caller has as much as it may have; some of that must end first."""


class ConflictError(HealthdError):
    """What is asked contradicts what was asked before under the same name."""


class NotFoundError(HealthdError):
    """Nothing of this name is known."""


def connection_words(error: Exception) -> str:
    """Why the other side could not be asked, and what to do where that is known."""
    said = (re.sub(r"\[Errno -?\d+\] | \(_ssl\.c:\d+\)", "", str(error)) or type(error).__name__).rstrip(".")
    for marks, remedy in _CONNECTION_REMEDIES:
        if any(mark in said for mark in marks):
            return f"{said}; {remedy}"
    return said


def words_of(error: Exception) -> str:
    """What the system says of a file, without the number and the path, which the message around it names."""
    return getattr(error, "strerror", None) or str(error)
