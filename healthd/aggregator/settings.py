"""What an operator can set of the aggregator."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from healthd.aggregator.identity.tokens import check_exposure
from healthd.core.config import tables_of
from healthd.core.errors import ConfigError
from healthd.core.http.addresses import parse_listen
from healthd.core.integrations import aggregator_tables, any_on, table_of
from healthd.integrations import INTEGRATIONS

R = TypeVar("R")

# The row of the database has room for 300 characters.
_URL = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,253}/?")


@dataclass(frozen=True, kw_only=True)
class AggregatorSettings:
    """Settings of `healthd aggregator`. ValueError and ConfigError name what cannot work together."""

    listen: str = "127.0.0.1:8090"
    """HOST:PORT to listen on; `[::]:8090` for IPv6, port 0 for any free port. Loopback by default, because TLS and
    tokens are required beyond it."""

    state_dir: Path = Path("/var/lib/healthd")
    """Directory of the database unless `database` is set; must be writable."""

    database: str | None = None
    """SQLAlchemy URL of the database; None: `aggregator.db` in `state_dir`, because one aggregator on one machine needs
    no server. `sqlite://` keeps it in memory, for a gate that only lives while one job starts (preflight)."""

    advertise_url: str | None = None
    """URL at which nodes and other aggregators on the same PostgreSQL reach this one while it leads; never a load
    balancer's. None: made of `listen`, with this host's name if it listens on all addresses."""

    ca_file: Path | None = None
    """PEM file of the CA that signed the certificates of the other aggregators on the same PostgreSQL; None trusts the
    system's."""

    token_table: Path | None = None
    """TOML file of the accepted bearer tokens, as `healthd token` writes it; None: anyone who reaches the port may
    do everything, which is only allowed on loopback."""

    tls_cert: Path | None = None
    """PEM file of the server's certificate chain; None: plain HTTP, which is only allowed on loopback."""

    tls_key: Path | None = None
    """PEM file of the certificate's private key."""

    insecure: bool = False
    """Listen beyond loopback without TLS or tokens. Anyone there can then admit, hold and reject jobs."""

    max_nodes: int = 20_000
    """Maximum number of nodes kept in memory: twice the fleet of the benchmark."""

    max_state_bytes: int = 256 * 1024
    """Largest state that a node may send, in bytes: about ten times that of a node with 16 devices and all checks
    failing."""

    max_body_bytes: int = 2 * 1024 * 1024
    """Largest body of any other request, in bytes: a gate that names 20,000 nodes of 60 characters fits."""

    hold_max_seconds: float = 25.0
    """Longest time that an answer is delayed if the caller asked to wait: load balancers close connections after 30 or
    60 s. Without a load balancer in between, 60 s halves the load of a fleet of more than 10,000 nodes: each node is
    told how long to ask for, 25 s up to 5,000 nodes. A node is then taken for silent later; see `policy.silent`."""

    read_timeout_seconds: float = 10.0
    """Time limit for receiving a request's body, so that a slow or dead client does not block a place."""

    handshake_seconds: float = 30.0
    """Time for all nodes of a group or a preflight to confirm the start, counted from the first confirmation. Hooks
    read their answer within milliseconds, so one that takes half a minute has ended."""

    stop_seconds: float = 3.0
    """Time for current requests and tasks to end after SIGTERM; with the database's it stays under 5 s."""

    preflight: bool = False
    """The aggregator lives for the gate of one preflight, whose ranks answer the roll call here. Never set for a
    standing aggregator."""

    runbooks_url: str | None = None
    """Where your team publishes docs/runbooks. The page links each reason to `RUNBOOKS_URL/reasons.md#CODE`. None: no
    links."""

    integrations: Mapping[str, Any] = tables_of(lambda: aggregator_tables(INTEGRATIONS))
    """The tables of integrations that are set, by key; see `of`."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together; set both or neither")
        positive = (
            "max_nodes",
            "max_state_bytes",
            "max_body_bytes",
            "read_timeout_seconds",
            "handshake_seconds",
            "stop_seconds",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}")
        if not 0 <= self.hold_max_seconds <= 60:
            raise ConfigError(f"hold_max must be between 0 s and 60 s, not {self.hold_max_seconds} s")
        if self.runbooks_url is not None and not self.runbooks_url.startswith(("https://", "http://")):
            raise ConfigError(f"runbooks_url must begin with https:// or http://, not {self.runbooks_url[:80]!r}")
        if self.advertise_url is not None and not _URL.fullmatch(self.advertise_url):
            raise ConfigError(f"advertise_url: {self.advertise_url[:80]!r} is not a URL; write https://HOST:8090")
        if self.tls_cert is not None and (self.advertise_url or "https:").startswith("http:"):
            raise ConfigError(
                f"advertise_url: {self.advertise_url!r} is plain HTTP and this one speaks TLS; write https"
            )
        check_exposure(
            hosts=[self.address[0]],
            tokens=self.token_table is not None or any_on(self.integrations),
            tls=self.tls_cert is not None,
            insecure=self.insecure,
        )

    def of(self, key: str, record: type[R]) -> R:
        """The table of an integration; with its defaults where nothing is set."""
        return table_of(self.integrations, key, record)

    @property
    def address(self) -> tuple[str, int]:
        """`listen` as host and port; ListenError when it is neither."""
        return parse_listen(self.listen)

    def own_url(self, address: str) -> str:
        """Where others reach this aggregator, which listens on `address`: HOST:PORT with the port that it got."""
        if self.advertise_url is not None:
            return self.advertise_url.rstrip("/")
        host, _, port = address.rpartition(":")
        if host in ("0.0.0.0", "[::]"):  # noqa: S104  (it is compared)
            host = socket.gethostname()
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{port}"

    @property
    def database_url(self) -> str:
        """`database`, or where it is when none was named."""
        return self.database if self.database is not None else f"sqlite:///{self.state_dir / 'aggregator.db'}"
