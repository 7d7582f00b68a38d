"""An aggregator as its owner runs it beyond one machine: with tokens, and TLS by a CA that nobody's system knows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx
import trustme

from healthd.aggregator.identity.tokens import Scope, new_token


@dataclass(frozen=True)
class Secured:
    """The files of it in a folder: `ca.pem`, `cert.pem`, `key.pem`, `tokens.toml`, and `SCOPE.token` for each scope."""

    folder: Path

    @property
    def aggregator(self) -> tuple[str, ...]:
        """What the aggregator is started with."""
        files = {"--token-table": "tokens.toml", "--tls-cert": "cert.pem", "--tls-key": "key.pem"}
        return tuple(word for option, name in files.items() for word in (option, str(self.folder / name)))

    def client(self, scope: Scope) -> tuple[str, ...]:
        """What a node or a hook is started with."""
        return ("--token-file", str(self.token_file(scope)), "--ca-file", str(self.folder / "ca.pem"))

    def token_file(self, scope: Scope) -> Path:
        return self.folder / f"{scope.value}.token"

    def http(self, scope: Scope) -> httpx.Client:
        """A client of a program."""
        trust = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        headers = {"Authorization": f"Bearer {self.token_file(scope).read_text().strip()}"}
        return httpx.Client(verify=trust, trust_env=False, headers=headers)


def secure(folder: Path) -> Secured:
    """Make the files."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    found, entries = Secured(folder), ""
    for scope in Scope:
        token, entry = new_token(scope.value, [scope])
        found.token_file(scope).write_text(f"{token}\n")
        entries += f"{entry}\n"
    (folder / "tokens.toml").write_text(entries)
    for path in folder.iterdir():
        path.chmod(0o600)
    return found
