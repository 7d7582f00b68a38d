"""What an operator can set of the aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from healthd.aggregator.auth import check_exposure
from healthd.core.errors import ConfigError
from healthd.core.http.addresses import parse_listen


@dataclass(frozen=True, kw_only=True)
class AggregatorSettings:
    """Settings of `healthd aggregator`. ValueError and ConfigError name what cannot work together."""

    listen: str = "127.0.0.1:8090"
    """HOST:PORT to listen on; `[::]:8090` for IPv6, port 0 for any free one. Loopback by default, because beyond it TLS
    and tokens must be set."""

    state_dir: Path = Path("/var/lib/healthd")
    """Directory that holds the database where `database` names none; must be writable."""

    database: str | None = None
    """SQLAlchemy URL of the database; None is `aggregator.db` in `state_dir`, because one aggregator on one machine
    needs no server. `sqlite://` keeps it in memory: for a gate that lives as long as one job's start (preflight)."""

    token_file: Path | None = None
    """TOML file of bearer tokens; None means that everyone who reaches the port may do everything, which is allowed on
    loopback alone."""

    tls_cert: Path | None = None
    """PEM file of the server's certificate chain; None is plain HTTP, allowed on loopback alone."""

    tls_key: Path | None = None
    """PEM file of the certificate's private key."""

    insecure: bool = False
    """Listen beyond loopback without TLS or tokens all the same. Anyone there can then admit, hold and reject jobs."""

    max_nodes: int = 20_000
    """Most nodes kept in memory: twice the fleet that the benchmark runs with."""

    max_state_bytes: int = 256 * 1024
    """Largest state a node may send, in bytes: some ten times that of a node with 16 devices and all checks failing."""

    max_body_bytes: int = 2 * 1024 * 1024
    """Largest body of any other request, in bytes: a gate that names 20,000 nodes of 60 characters fits."""

    hold_seconds: float = 25.0
    """Longest time that an answer is held back when the caller asked to wait: load balancers cut at 30 or 60 s."""

    read_timeout_seconds: float = 10.0
    """Time within which a request's body must have arrived: a slow or half-dead client must not hold its place."""

    handshake_seconds: float = 30.0
    """Time in which all nodes of a group or a preflight must confirm the start, from the first that does: a hook reads
    its answer within milliseconds, so half a minute means that it is gone."""

    stop_seconds: float = 3.0
    """Time that requests under way and tasks have to end after SIGTERM: with the database's it stays under 5 s."""

    preflight: bool = False
    """It lives for the gate of one preflight, and its ranks call the roll here; no standing aggregator has that."""

    runbooks_url: str | None = None
    """Where this team publishes docs/runbooks: the page links each reason to its runbook below it
    (`RUNBOOKS_URL/reasons/CODE.md`). None: the page has what the catalogue says of a reason and no link, because no
    address would be right for everybody."""

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
        if not 0 <= self.hold_seconds <= 60:
            raise ConfigError(f"hold must be between 0 s and 60 s, not {self.hold_seconds} s")
        if self.runbooks_url is not None and not self.runbooks_url.startswith(("https://", "http://")):
            raise ConfigError(f"runbooks_url must begin with https:// or http://, not {self.runbooks_url[:80]!r}")
        check_exposure(
            hosts=[self.address[0]],
            tokens=self.token_file is not None,
            tls=self.tls_cert is not None,
            insecure=self.insecure,
        )

    @property
    def address(self) -> tuple[str, int]:
        """`listen` as host and port; ListenError when it is neither."""
        return parse_listen(self.listen)

    @property
    def database_url(self) -> str:
        """`database`, or where it is when none was named."""
        return self.database if self.database is not None else f"sqlite:///{self.state_dir / 'aggregator.db'}"
