"""
Who may ask the aggregator what: bearer tokens with scopes, from a file, and the rule for what may listen where.

Nothing here knows HTTP beyond the text of an `Authorization` header; the node's own key is the registry's matter.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthd.core.bounded import read_file
from healthd.core.config import parse_toml
from healthd.core.errors import BadInputError, ConfigError, HealthdError, words_of
from healthd.core.file_trust import check_file
from healthd.core.tasks import LogOnce

log = logging.getLogger(__name__)

# Each request compares its token with all of them.
MAX_TOKENS = 200
MAX_FILE_BYTES = 1 << 20
MIN_TOKEN_LENGTH = 16
# Looking at the file is one stat(); once a second keeps it off the path of a thousand syncs a second.
RECHECK_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Scope(str, enum.Enum):
    """What a token may do. ADMIN may do everything; GATE may also read; SYNC is for nodes and nothing else."""

    READ = "read"
    SYNC = "sync"
    GATE = "gate"
    ADMIN = "admin"


_IMPLIED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.SYNC: frozenset({Scope.SYNC}),
    Scope.GATE: frozenset({Scope.GATE, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
}


class AuthError(HealthdError):
    """The caller may not do this: 401 when we do not know who it is, 403 when we do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who is asking. `name` is the token's name in the file, or `loopback` where no tokens are asked for."""

    name: str
    scopes: frozenset[Scope]


EVERYONE = Caller(name="loopback", scopes=frozenset(Scope))


class Guard:
    """
    Says who a caller is. Without a token file everyone may do everything: `check_exposure` says where that is allowed.

    The file is read again when it changes; one that cannot be used is reported once and the last good one stands, so
    that a half-written file locks nobody out.
    """

    def __init__(self, token_file: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = token_file
        self._clock = clock
        self._callers: dict[bytes, Caller] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_at = 0.0
        self._trouble = LogOnce(log)
        if token_file is not None:
            self._stamp = _stamp(token_file)
            self._callers = read_tokens(token_file)
            self._looked_at = clock()

    @property
    def open(self) -> bool:
        """True where no token is asked for."""
        return self._file is None

    def identify(self, authorization: str | None) -> Caller:
        """The caller that an `Authorization` header names; AuthError(401) when it names none that we know."""
        if self._file is None:
            return EVERYONE
        self._reread()
        if authorization is None:
            raise AuthError(401, "a token is required: send 'Authorization: Bearer TOKEN'")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthError(401, "the Authorization header must read 'Bearer TOKEN'")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # Every known digest is looked at, in constant time, so that the answer's delay tells nothing.
        matches = [caller for known, caller in self._callers.items() if hmac.compare_digest(known, digest)]
        if matches:
            return matches[0]
        raise AuthError(401, "this token is not known here; ask the operator of the aggregator for one")

    def require(self, authorization: str | None, scope: Scope) -> Caller:
        """The caller, if it may do what `scope` allows; else AuthError with 401 or 403."""
        caller = self.identify(authorization)
        if scope not in caller.scopes:
            has = ", ".join(sorted(s.value for s in caller.scopes))
            raise AuthError(403, f"token {caller.name!r} lacks scope {scope.value!r}; it has: {has}")
        return caller

    def _reread(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked_at < RECHECK_SECONDS:
            return
        self._looked_at = now
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._callers = read_tokens(self._file)
            self._stamp = stamp
            self._trouble.clear()
            log.info("%s: %d tokens read again", self._file, len(self._callers))
        except ConfigError as error:
            self._trouble.say(f"{error}; the tokens read before stay in force")


def read_tokens(file: Path) -> dict[bytes, Caller]:
    """
    The tokens of a TOML file, by the SHA-256 of the token.

    It is a list of tables `[[token]]` with `name`, `scopes` and either `sha256` (as `new_token` writes it) or `token`
    in clear.

    ConfigError names the file, the entry and the remedy. Nobody but the owner may be able to write it, and nobody
    outside the owner's group to read it when it holds tokens in clear.
    """
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        values = parse_toml(read_file(file, MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such token file; make one with 'healthd token'") from None
    except (OSError, BadInputError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: cannot be used as a token file: {error}") from None
    if mode & 0o022:
        raise ConfigError(f"{file}: others may write it (mode {mode:04o}); run: chmod go-w {file}")
    check_file(file, "token file")
    entries = values.pop("token", [])
    if values or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file}: must hold tables [[token]] and nothing else; see 'healthd token --help'")
    if not 1 <= len(entries) <= MAX_TOKENS:
        raise ConfigError(f"{file}: holds {len(entries)} tokens; 1 to {MAX_TOKENS} are allowed")
    found: dict[bytes, Caller] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        digest, caller, clear = _entry(entry, f"{file}: token {number}")
        if clear and mode & 0o007:
            raise ConfigError(f"{file}: holds tokens in clear and everybody may read it; run: chmod o-rwx {file}")
        if caller.name in names or digest in found:
            raise ConfigError(f"{file}: token {number}: {caller.name!r} is there twice; remove one")
        names.add(caller.name)
        found[digest] = caller
    return found


def _entry(entry: dict[str, Any], where: str) -> tuple[bytes, Caller, bool]:
    """Digest, caller and whether the token stands there in clear."""
    if unknown := entry.keys() - {"name", "scopes", "sha256", "token"}:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}; it has: name, scopes, sha256, token")
    name, scopes = entry.get("name"), entry.get("scopes")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: needs a 'name' of letters, digits, dots, dashes (at most 64)")
    if not isinstance(scopes, list) or not scopes or not set(map(str, scopes)) <= {s.value for s in Scope}:
        raise ConfigError(f"{where} ({name}): 'scopes' must be a list out of: {', '.join(s.value for s in Scope)}")
    clear, hashed = entry.get("token"), entry.get("sha256")
    if (clear is None) == (hashed is None):
        raise ConfigError(f"{where} ({name}): needs either 'sha256' or 'token'")
    if clear is not None:
        if not isinstance(clear, str) or len(clear) < MIN_TOKEN_LENGTH or clear != clear.strip():
            raise ConfigError(f"{where} ({name}): 'token' must be text of at least {MIN_TOKEN_LENGTH} characters")
        digest = hashlib.sha256(clear.encode()).digest()
    elif isinstance(hashed, str) and _SHA256.fullmatch(hashed):
        digest = bytes.fromhex(hashed)
    else:
        raise ConfigError(f"{where} ({name}): 'sha256' must be 64 hexadecimal digits in lower case")
    allowed = frozenset().union(*(_IMPLIED[Scope(scope)] for scope in scopes))
    return digest, Caller(name=name, scopes=allowed), clear is not None


def new_token(name: str, scopes: Iterable[Scope]) -> tuple[str, str]:
    """
    A fresh token, and the lines for the token file that make it known there.

    The file gets its hash alone: who can read the file still cannot use it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a token; use letters, digits, dots and dashes (at most 64)")
    token = secrets.token_urlsafe(32)
    listed = ", ".join(f'"{scope.value}"' for scope in scopes)
    if not listed:
        raise ConfigError(f"token {name!r} needs at least one scope of: {', '.join(s.value for s in Scope)}")
    digest = hashlib.sha256(token.encode()).hexdigest()
    return token, f'[[token]]\nname = "{name}"\nscopes = [{listed}]\nsha256 = "{digest}"\n'


def is_loopback(host: str) -> bool:
    """Whether what listens on `host` can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(*, hosts: Iterable[str], tokens: bool, tls: bool, insecure: bool) -> None:
    """Refuse to be reachable beyond this machine without TLS and tokens, unless somebody said so: ConfigError."""
    outside = [host for host in hosts if not is_loopback(host)]
    missing = [name for name, there in (("tls_cert and tls_key", tls), ("token_file", tokens)) if not there]
    if outside and missing and not insecure:
        raise ConfigError(
            f"listening on {outside[0] or 'all addresses'} without {' and '.join(missing)}: set them, "
            "listen on 127.0.0.1, or say --insecure"
        )


def key_hash(key: str) -> str:
    """What is kept of a node's key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such token file; make one with 'healthd token'") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {words_of(error)}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino
