"""A PostgreSQL server of our own, on a free port of loopback, that can be stopped, frozen and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.aggregator.proxy import Proxy
from tests.aggregator.service import until

FOLDER = os.environ.get("TESTS_POSTGRES")
"""The folder with the programs of a server, where it is not the version of this machine (CONTRIBUTING.md)."""
# Debian keeps them off PATH.
POSTGRES = (
    f"{FOLDER}/postgres"
    if FOLDER
    else shutil.which("postgres") or next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))), None)
)


def user_of_postgres() -> int | None:
    """PostgreSQL refuses to run as root: then another user must run it."""
    if os.geteuid() != 0:
        return None
    import pwd

    names = {entry.pw_name: entry.pw_uid for entry in pwd.getpwall()}
    return names.get("postgres", names.get("nobody"))


def wait_until_ready(url: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"connect_timeout": 2})
    until = time.monotonic() + 30
    while True:
        try:
            engine.connect().close()
            return
        except sa.exc.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


class Server:
    """
    Made in `place`, an empty directory. `url` names its database; skips the test where PostgreSQL is missing.

    `also` is a further address of this machine by which it can be reached, from anywhere and without a password. With
    `copied`, a server that is stopped, it is a standby of that one.
    """

    def __init__(self, place: Path, also: str | None = None, copied: Server | None = None) -> None:
        programs = Path(os.path.realpath(POSTGRES)).parent if POSTGRES else None
        if FOLDER and not Path(FOLDER, "initdb").exists():
            pytest.fail(f"TESTS_POSTGRES={FOLDER} has no initdb; name the folder with the server's programs")
        if programs is None or not (programs / "initdb").exists():
            pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
        pytest.importorskip("psycopg", reason="psycopg is not installed; pip install '.[postgresql]'")
        self._programs, self.place, self._uid = programs, place, user_of_postgres()
        if self._uid is not None:
            os.chown(place, self._uid, -1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"postgresql+psycopg://healthd@127.0.0.1:{self.port}/postgres"
        self._listen = "127.0.0.1"
        self._process: subprocess.Popen[bytes] | None = None
        if copied is not None:
            subprocess.run(["cp", "--archive", copied._data, self._data], check=True)
            Path(self._data, "standby.signal").touch()
            return
        init = [str(programs / "initdb"), "-D", self._data, "-U", "healthd", "-A", "trust"]
        init += ["--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run(init, check=True, capture_output=True, user=self._uid, cwd=place)
        if also is not None:
            self._listen += f",{also}"
            with Path(self._data, "pg_hba.conf").open("a") as rules:
                rules.write("host all all all trust\n")

    @property
    def _data(self) -> str:
        return str(self.place / "data")

    @property
    def address(self) -> str:
        """For a `Proxy`."""
        return f"tcp://127.0.0.1:{self.port}"

    def start(self, **settings: str) -> None:
        """Start it, and wait until it lets somebody in."""
        command = [str(self._programs / "postgres"), "-D", self._data, "-p", str(self.port), "-h", self._listen]
        command += ["-c", f"unix_socket_directories={self.place}", "-c", "fsync=off"]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, user=self._uid, cwd=self.place, stdout=quiet, stderr=quiet)
        wait_until_ready(self.url)

    def stop(self) -> None:
        """At once, as in a crash: does not wait for clients, and writes nothing more. Safe to repeat."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=20)
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """None of its processes runs: the kernel takes connections for it, and nobody answers."""
        assert self._process is not None
        there = [self._process.pid, *_children(self._process.pid)]
        for pid in there:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """Somebody else's connection, each statement a transaction of its own."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def end_sessions(url: str) -> None:
    """The server ends all connections to this database but ours, as it does when it restarts."""
    ours = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    with connected(url) as connection:
        connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def serving(also: str | None = None) -> Iterator[Server]:
    """A server for as long as the block; not below pytest's own folder, which is closed to the server's user."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as place:
        server = Server(Path(place), also)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@dataclass
class Replicated:
    """
    A server and its hot standby, which follows it by streaming replication over `stream`. `name` leads to the server
    that is in charge, as a name of DNS or a load balancer does.
    """

    primary: Server
    standby: Server
    stream: Proxy
    name: Proxy

    @property
    def url(self) -> str:
        """The database by that name."""
        return f"postgresql+psycopg://healthd@{self.name.url.rpartition('/')[2]}/postgres"

    @property
    def listed(self) -> str:
        """The database by both addresses, in libpq's way."""
        hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in (self.primary, self.standby))
        return f"postgresql+psycopg://healthd@/postgres?{hosts}&target_session_attrs=read-write"

    def wait_until_caught_up(self) -> None:
        """Until the standby has all that the primary has."""
        behind = "SELECT coalesce(bool_and(replay_lsn = pg_current_wal_flush_lsn()), false) FROM pg_stat_replication"
        with connected(self.primary.url) as connection:
            until(lambda: bool(connection.exec_driver_sql(behind).scalar()))

    def fail_over(self) -> None:
        """The primary is lost at once, and its name leads to the standby, which still takes no writes."""
        self.primary.stop()
        self.name.switch(self.standby.address)

    def promote(self) -> None:
        """The standby takes writes from now on."""
        with connected(self.standby.url) as connection:
            assert connection.exec_driver_sql("SELECT pg_promote()").scalar()


@contextlib.contextmanager
def replicated(*, synchronous: bool) -> Iterator[Replicated]:
    """Both for as long as the block. `synchronous`: the primary answers a commit once the standby has it."""
    with contextlib.ExitStack() as stack:
        places = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="postgres-"))) for _ in range(2)]
        primary = Server(places[0])
        standby = Server(places[1], copied=primary)
        stream, name = (stack.enter_context(Proxy(primary.address)) for _ in range(2))
        for server in (primary, standby):
            stack.callback(server.stop)
        primary.start()  # a synchronous one answers nobody before its standby is there
        through = f"host=127.0.0.1 port={stream.url.rpartition(':')[2]} user=healthd application_name=standby"
        standby.start(primary_conninfo=through)
        both = Replicated(primary, standby, stream, name)
        both.wait_until_caught_up()
        if synchronous:
            with connected(primary.url) as connection:
                connection.exec_driver_sql("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
                connection.exec_driver_sql("SELECT pg_reload_conf()")
                shown = "SELECT sync_state FROM pg_stat_replication"
                until(lambda: connection.exec_driver_sql(shown).scalar() == "sync")
        yield both
