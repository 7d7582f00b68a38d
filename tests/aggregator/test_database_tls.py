"""PostgreSQL over TLS, as in docs/high_availability.md: `sslmode=verify-full`, with a certificate of a private CA."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from healthd.aggregator.store import Store, Watch
from healthd.core.errors import ConfigError
from tests.aggregator.postgres import Server, connected, serving

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server whose certificate is for 127.0.0.1, and a folder with the certificates of its CA and of another one."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    with serving() as found:
        found.stop()
        for name in ("key.pem", "cert.pem"):
            there = Path(shutil.copy(folder / name, found.place / name))
            there.chmod(0o600)
            os.chown(there, found.place.stat().st_uid, -1)
        found.start(ssl="on", ssl_cert_file=f"{found.place}/cert.pem", ssl_key_file=f"{found.place}/key.pem")
        yield found, folder


def test_aggregator_connects_by_a_certificate_that_is_verified_in_full(server: tuple[Server, Path]) -> None:
    found, folder = server
    url = f"{found.url}?sslmode=verify-full&sslrootcert={folder}/ca.pem"
    store = Store.open(url)
    watch = Watch(url)
    assert watch.look()[0].holder == store.holder
    with connected(found.url) as connection:
        query = "SELECT count(*) FILTER (WHERE NOT ssl), count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
        query += "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        plain, sessions = connection.exec_driver_sql(query).one()
    assert (plain, sessions) == (0, 1), "of the store"
    for opened in (watch, store):
        opened.close()


@pytest.mark.parametrize(
    ("change", "said", "remedy"),
    [
        ("sslrootcert={folder}/other.pem", "certificate verify failed", "as sslrootcert in aggregator.database"),
        (
            "sslrootcert={folder}/ca.pem&host=localhost&hostaddr=127.0.0.1",
            "does not match host name",
            "name from its certificate in",
        ),
        ("sslrootcert={folder}/none.pem", "does not exist", "correct aggregator.database"),
    ],
    ids=["another CA", "another name", "no CA"],
)
def test_certificate_that_does_not_fit_is_refused_in_one_line(
    server: tuple[Server, Path], change: str, said: str, remedy: str
) -> None:
    found, folder = server
    asked = f"sslmode=verify-full&{change.format(folder=folder)}"
    host = "" if "host=" in change else "127.0.0.1"
    url = f"postgresql+psycopg://healthd@{host}:{found.port}/postgres?{asked}"
    for attempt in (lambda: Store.open(url), lambda: Watch(url).look()):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert said in str(refused.value)
        assert remedy in str(refused.value)
        assert "\n" not in str(refused.value)


def test_server_without_tls_is_refused_where_the_url_asks_for_it(tmp_path: Path) -> None:
    with serving() as plain, pytest.raises(ConfigError, match=r"does not support SSL.*turn ssl on at the server"):
        Store.open(f"{plain.url}?sslmode=verify-full&sslrootcert={tmp_path}/ca.pem")
