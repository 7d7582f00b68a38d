"""
TLS of a client: what verifies the other side, and which failures only a change of the settings can mend.

A certificate that this client does not trust, and TLS on only one side, need a change of the command or its settings,
so they are not retried. An expired certificate is: the operator of the other side renews it, and the same command
succeeds.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from healthd.core.errors import ConfigError, connection_words, words_of
from healthd.core.file_trust import check_file
from healthd.core.http.connection import is_cut_off

# X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED, _CRL_NOT_YET_VALID and _CRL_HAS_EXPIRED of OpenSSL's x509_vfy.h.
_PASSING_CODES = frozenset({9, 10, 11, 12})
# What OpenSSL calls an answer that is not TLS.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
PROBE_SECONDS = 3.0
"""How long the question may take whether a port speaks TLS: it is asked only where a plain request was just cut off."""


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """What verifies the other side by this CA; None is the system's. ConfigError where the file cannot be used."""
    if ca_file is not None:
        check_file(ca_file, "CA file")
    try:
        if ca_file is not None and ca_file.is_fifo():
            raise OSError("it is a pipe")  # OpenSSL would wait in it, and hear no signal
        return ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except (OSError, ssl.SSLError) as error:
        if ca_file is None:
            raise ConfigError(f"the system's CAs cannot be loaded: {words_of(error)}; use --ca-file") from None
        raise ConfigError(f"{ca_file}: not a CA file: {words_of(error)}; name another with --ca-file") from None


def verification(url: str, ca_file: Path | None = None) -> ssl.SSLContext | Literal[False]:
    """
    How a client verifies the other side of `url`: by a CA file, else by the authorities of the system.

    False without TLS, for which all authorities would be loaded in vain; a bad CA file is told there too.
    """
    return trusting(ca_file) if ca_file is not None or not url.startswith("http://") else False


def setting_to_change(url: str, error: Exception) -> str | None:
    """Why no request to `url` can succeed with these settings, and what to change; None where another try may help."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return None if cause.verify_code in _PASSING_CODES else connection_words(error)
        if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
            return connection_words(error)
    return https_instead(url) if is_cut_off(error) else None


def https_instead(url: str) -> str | None:
    """What to change where `url` is plain HTTP and its port speaks TLS; None otherwise."""
    address = urlsplit(url)
    if address.scheme != "http" or not _speaks_tls(address.hostname or "", address.port or 80):
        return None
    return f"it speaks TLS: write https://{address.netloc}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came of; at most as many as a library nests."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent, and nothing is believed
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host, port), PROBE_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        return True
    return False
