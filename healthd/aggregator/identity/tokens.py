"""
Who may ask the aggregator what, and for which nodes it may speak: bearer tokens with scopes, from a file, and the rule
for what may listen where.

Nothing here knows HTTP beyond the text of an `Authorization` header; the node's own key is the registry's matter.
"""

from __future__ import annotations

import enum
import fnmatch
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from checks.printable import some
from healthd.core.bounded import read_file
from healthd.core.config import parse_toml
from healthd.core.errors import BadInputError, ConfigError, HealthdError, words_of
from healthd.core.file_trust import check_file
from healthd.core.tasks import LogOnce
from healthd.core.workload import Pod, pod_of

log = logging.getLogger(__name__)

# Each request compares its token with all of them.
MAX_TOKENS = 200
MAX_FILE_BYTES = 1 << 20
MIN_TOKEN_LENGTH = 16
# Looking at the file is one stat(); once a second keeps it off the path of a thousand syncs a second.
RECHECK_SECONDS = 1.0
# A name is compared with all patterns of its token at each sync.
MOST_PATTERNS = 32
MOST_WILDCARDS = 8
MOST_PATTERNS_NAMED = 3

_NODES = re.compile(r"[A-Za-z0-9._*?-]{1,253}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

PEER: ContextVar[str] = ContextVar("PEER", default="")
"""The address that the request comes from which is answered now."""


class Scope(str, enum.Enum):
    """What a token may do. ADMIN may do everything; GATE may also read; SYNC is for nodes and nothing else."""

    READ = "read"
    SYNC = "sync"
    GATE = "gate"
    ADMIN = "admin"


IMPLIED: Mapping[Scope, frozenset[Scope]] = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.SYNC: frozenset({Scope.SYNC}),
    Scope.GATE: frozenset({Scope.GATE, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
}
"""What each scope allows."""


class AuthError(HealthdError):
    """
    The caller may not do this: 401 when we do not know who it is, 403 when we do; 503 when who could say cannot be
    asked.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An instance of EC2, by a document that AWS has signed; `launched` is when it started last, as RFC 3339."""

    id: str
    launched: str


@dataclass(frozen=True, kw_only=True)
class Caller:
    """
    Who is asking. `name` is the token's name in the file, the service account as NAMESPACE/NAME, or `loopback` where no
    tokens are asked for.

    `nodes` are patterns of the node names for which it may speak; None: for every name. `pod` is the one that
    Kubernetes says it is, on the only node of `nodes`, `instance` the one of EC2 that AWS says; None for everybody
    else.
    """

    name: str
    scopes: frozenset[Scope]
    nodes: tuple[str, ...] | None = None
    pod: Pod | None = None
    instance: Instance | None = None

    @property
    def hook(self) -> Pod | None:
        """The pod of a job whose hook this is by the word of Kubernetes; None for a node's daemon and anybody else."""
        return self.pod if Scope.GATE in self.scopes else None

    def __str__(self) -> str:
        if self.instance is not None:
            return f"instance {self.instance.id}"
        if self.pod is None:
            return f"token {self.name!r}"
        return f"service account {self.name} (pod {self.pod.full_name})"

    def speaks_for(self, node: str) -> bool:
        """Whether it may speak for the node of this name: as its daemon, as a hook there, or ask for it."""
        return self.nodes is None or any(fnmatch.fnmatchcase(node, pattern) for pattern in self.nodes)

    @property
    def limited_as(self) -> str | None:
        """By what name its gates and held requests are counted; None where it speaks for all nodes."""
        return None if self.nodes is None else str(self)

    def may_end(self, node: str, workload: str | None) -> bool:
        """
        Whether a later attempt that it asks for ends the lease of an earlier one on this node. A pod ends its own, and
        not that of another pod, which may still run.
        """
        own, other = self.hook, pod_of(workload)
        same = own is None or other is None or (other.full_name == own.full_name and other.uid in (None, own.uid))
        return same and self.speaks_for(node)

    def may_close(self, node: str | None) -> bool:
        """
        Whether a later attempt that it asks for closes an open gate of the job, as far as this node of it goes; None:
        any node of a pool. For a pod the name of the job is enough, because that is of its namespace.
        """
        return self.hook is not None or self.nodes is None or (node is not None and self.speaks_for(node))

    def check_speaks_for(self, nodes: Iterable[str]) -> None:
        """AuthError(403), in one line, for the first of these nodes for which it may not speak."""
        if self.nodes is None:
            return
        for node in nodes:
            if not self.speaks_for(node):
                raise AuthError(
                    403,
                    f"{self} may not act for node {node[:253]!r}, only for {some(self.nodes, MOST_PATTERNS_NAMED)}; "
                    "use a token of that node",
                )


EVERYONE = Caller(name="loopback", scopes=frozenset(Scope))


class Platform(Protocol):
    """Who the bearers of tokens are that no file has: see `service_accounts` and integrations."""

    def fresh(self, digest: bytes) -> Caller | None:
        """The caller that a token of this SHA-256 was said to be, where that need not be asked again yet."""

    def known(self, digest: bytes) -> Caller | None:
        """The same, where it was said lately enough to go on while nobody can be asked."""

    async def identify(self, token: str, digest: bytes) -> Caller | None:
        """The caller, asked for where that is due; None for no token of this platform. AuthError."""

    def trouble(self) -> str:
        """Why it cannot be asked now, in one line; empty in good days."""


class Platforms:
    """Several platforms as one: a token is of the first that knows it."""

    def __init__(self, platforms: Sequence[Platform]) -> None:
        self._platforms = tuple(platforms)

    def fresh(self, digest: bytes) -> Caller | None:
        """As `Platform.fresh`."""
        return next((found for one in self._platforms if (found := one.fresh(digest)) is not None), None)

    def known(self, digest: bytes) -> Caller | None:
        """As `Platform.known`."""
        return next((found for one in self._platforms if (found := one.known(digest)) is not None), None)

    async def identify(self, token: str, digest: bytes) -> Caller | None:
        """As `Platform.identify`."""
        for one in self._platforms:
            if (found := await one.identify(token, digest)) is not None:
                return found
        return None

    def trouble(self) -> str:
        """As `Platform.trouble`."""
        return next((why for one in self._platforms if (why := one.trouble())), "")


class Guard:
    """
    Says who a caller is: by the token table, or by the word of its platform. Without both everyone may do everything:
    `check_exposure` says where that is allowed.

    The file is read again when it changes; one that cannot be used is reported once and the last good one stands, so
    that a half-written file locks nobody out.
    """

    def __init__(
        self,
        token_table: Path | None,
        *,
        platform: Platform | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = token_table
        self._platform = platform
        self._clock = clock
        self._callers: dict[bytes, Caller] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_at = 0.0
        self._trouble = LogOnce(log)
        if token_table is not None:
            self._stamp = _stamp(token_table)
            self._callers = read_tokens(token_table)
            self._looked_at = clock()

    @property
    def open(self) -> bool:
        """True where no token is asked for."""
        return self._file is None and self._platform is None

    def trouble(self) -> str:
        """Why the platform cannot be asked about tokens; empty in good days, and where there is none."""
        return "" if self._platform is None else self._platform.trouble()

    async def admit(self, authorization: str | None, scope: Scope) -> Caller:
        """As `require`, after the platform was asked about its token where that is due: AuthError also with 503."""
        if self._platform is None or authorization is None:
            return self.require(authorization, scope)
        return _allowed(await self._ask(self._platform, authorization), scope)

    def admit_at_once(self, authorization: str | None, scope: Scope) -> Caller | None:
        """As `admit`, where nobody need be asked; else None. AuthError."""
        if self._platform is None or authorization is None:
            return self.require(authorization, scope)
        digest = _digest(_token_in(authorization))
        caller = self._platform.fresh(digest) or self._in_file(digest)
        return None if caller is None else _allowed(caller, scope)

    async def review(self, authorization: str | None) -> None:
        """Have the platform say whose token this is, where that is due, for `require`. AuthError as `admit`."""
        if self._platform is not None and authorization is not None:
            await self._ask(self._platform, authorization)

    async def _ask(self, platform: Platform, authorization: str) -> Caller:
        token = _token_in(authorization)
        digest = _digest(token)
        caller = platform.fresh(digest) or self._in_file(digest) or await platform.identify(token, digest)
        return caller or _nobody()

    def identify(self, authorization: str | None) -> Caller:
        """The caller that an `Authorization` header names; AuthError(401) when it names none that we know."""
        if self.open:
            return EVERYONE
        if authorization is None:
            raise AuthError(401, "a token is required: send 'Authorization: Bearer TOKEN'")
        digest = _digest(_token_in(authorization))
        caller = self._in_file(digest)
        if caller is None and self._platform is not None:
            caller = self._platform.known(digest)
        return caller or _nobody()

    def require(self, authorization: str | None, scope: Scope) -> Caller:
        """The caller, if it may do what `scope` allows; else AuthError with 401 or 403."""
        return _allowed(self.identify(authorization), scope)

    def _in_file(self, digest: bytes) -> Caller | None:
        """The caller whose token the file has."""
        self._reread()
        # Every known digest is looked at, in constant time, so that the answer's delay tells nothing.
        matches = [caller for known, caller in self._callers.items() if hmac.compare_digest(known, digest)]
        return matches[0] if matches else None

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
            self._trouble.say(f"{error}; the previous tokens stay valid")


def read_tokens(file: Path) -> dict[bytes, Caller]:
    """
    The tokens of a TOML file, by the SHA-256 of the token.

    It is a list of tables `[[token]]` with `name`, `scopes` and either `sha256` (as `new_token` writes it) or `token`
    in clear; with `nodes`, patterns of node names, it speaks for these alone.

    ConfigError names the file, the entry and the remedy. Nobody but the owner may be able to write it, and nobody
    outside the owner's group to read it when it holds tokens in clear.
    """
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        values = parse_toml(read_file(file, MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such token table; create one with 'healthd token'") from None
    except (OSError, BadInputError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: cannot be used as a token table: {error}") from None
    if mode & 0o022:
        raise ConfigError(f"{file}: others can write it (mode {mode:04o}); run: chmod go-w {file}")
    check_file(file, "token table")
    entries = values.pop("token", [])
    if values or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file}: must contain only tables [[token]]; see 'healthd token --help'")
    if not 1 <= len(entries) <= MAX_TOKENS:
        raise ConfigError(f"{file}: contains {len(entries)} tokens; 1 to {MAX_TOKENS} are allowed")
    found: dict[bytes, Caller] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        digest, caller, clear = _entry(entry, f"{file}: token {number}")
        if clear and mode & 0o007:
            raise ConfigError(f"{file}: contains plain-text tokens and everyone can read it; run: chmod o-rwx {file}")
        if caller.name in names or digest in found:
            raise ConfigError(f"{file}: token {number}: the name {caller.name!r} is used twice; remove one")
        names.add(caller.name)
        found[digest] = caller
    return found


def _entry(entry: dict[str, Any], where: str) -> tuple[bytes, Caller, bool]:
    """Digest, caller and whether the token stands there in clear."""
    if unknown := entry.keys() - {"name", "scopes", "nodes", "sha256", "token"}:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}; known keys: name, scopes, nodes, sha256, token")
    name, scopes = entry.get("name"), entry.get("scopes")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: needs a 'name' of letters, digits, dots, dashes (at most 64)")
    if not isinstance(scopes, list) or not scopes or not set(map(str, scopes)) <= {s.value for s in Scope}:
        raise ConfigError(f"{where} ({name}): 'scopes' must be a list of: {', '.join(s.value for s in Scope)}")
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
        raise ConfigError(f"{where} ({name}): 'sha256' must be 64 lower-case hexadecimal digits")
    allowed = frozenset().union(*(IMPLIED[Scope(scope)] for scope in scopes))
    nodes = entry.get("nodes")
    if nodes is not None:
        if not isinstance(nodes, list) or not all(isinstance(one, str) for one in nodes):
            raise ConfigError(f"{where} ({name}): 'nodes' must be a list of names or patterns, as \"trn-a-*\"")
        nodes = check_patterns(nodes, map(Scope, scopes), f"{where} ({name})")
    return digest, Caller(name=name, scopes=allowed, nodes=nodes), clear is not None


def check_patterns(nodes: Sequence[str], scopes: Iterable[Scope], where: str) -> tuple[str, ...]:
    """The patterns of node names for a token of these scopes; ConfigError says what is wrong with them."""
    if other := sorted(scope.value for scope in set(scopes) - {Scope.SYNC, Scope.GATE}):
        raise ConfigError(f"{where}: node names need the scopes sync or gate, not {', '.join(other)}")
    if not 1 <= len(nodes) <= MOST_PATTERNS:
        raise ConfigError(f"{where}: has {len(nodes)} node patterns; 1 to {MOST_PATTERNS} are allowed")
    for pattern in nodes:
        if not _NODES.fullmatch(pattern) or pattern.count("*") + pattern.count("?") > MOST_WILDCARDS:
            raise ConfigError(
                f"{where}: {pattern[:80]!r} is not a pattern of node names; use letters, digits, dots, dashes, * and "
                f"? (at most {MOST_WILDCARDS} of these)"
            )
    return tuple(nodes)


def new_token(name: str, scopes: Iterable[Scope], nodes: Sequence[str] = ()) -> tuple[str, str]:
    """
    A fresh token, and the lines for the token table that make it known there. Empty `nodes`: it speaks for every node.

    The file gets its hash alone: who can read the file still cannot use it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a token name; use letters, digits, dots and dashes (at most 64)")
    token, scopes = secrets.token_urlsafe(32), tuple(scopes)
    listed = ", ".join(f'"{scope.value}"' for scope in scopes)
    if not listed:
        raise ConfigError(f"token {name!r} needs at least one scope of: {', '.join(s.value for s in Scope)}")
    patterns = check_patterns(nodes, scopes, f"token {name!r}") if nodes else ()
    quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
    of_nodes = f"nodes = [{quoted}]\n" if patterns else ""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return token, f'[[token]]\nname = "{name}"\nscopes = [{listed}]\n{of_nodes}sha256 = "{digest}"\n'


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
    missing = [name for name, there in (("tls_cert and tls_key", tls), ("token_table", tokens)) if not there]
    if outside and missing and not insecure:
        raise ConfigError(
            f"listening on {outside[0] or 'all addresses'} without {' and '.join(missing)}: set them, listen on "
            "127.0.0.1, or use --insecure"
        )


def _allowed(caller: Caller, scope: Scope) -> Caller:
    if scope not in caller.scopes:
        has = ", ".join(sorted(s.value for s in caller.scopes))
        raise AuthError(403, f"{caller} lacks scope {scope.value!r}; it has: {has}")
    return caller


def _nobody() -> NoReturn:
    raise AuthError(401, "this token is unknown; ask the aggregator's operator for one")


def _token_in(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise AuthError(401, "the Authorization header must have the form 'Bearer TOKEN'")
    return token.strip()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def key_hash(key: str) -> str:
    """What is kept of a node's key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such token table; create one with 'healthd token'") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {words_of(error)}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino
