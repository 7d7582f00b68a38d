"""`healthd tls init`: a local CA and a certificate for the aggregator, for sites that have no CA of their own."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from checks.host.running import TimeUpError, run_program
from healthd.core.errors import ConfigError, HealthdError, words_of

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"
CA_DAYS = 3650
"""Ten years: a new CA has to reach every node and hook."""
DAYS = 825
"""What the strictest clients take for a server's certificate."""
OPENSSL_SECONDS = 60.0
MAX_OUTPUT_BYTES = 65536

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,62})?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62})?)*")

_CONFIG = """
[req]
prompt = no
distinguished_name = subject
[subject]
CN = {subject}
[ca]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""

LOOPBACK = ("localhost", "127.0.0.1")


@click.group(short_help="Create a CA and a certificate for the aggregator: init.")
def tls() -> None:
    """Create certificates for the aggregator, for sites without a CA of their own."""


@tls.command(short_help="Create a local CA and a certificate of the aggregator.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="D",
    help="Directory for the files (default: the current one).",
)
@click.option(
    "--days",
    type=click.IntRange(1, CA_DAYS),
    default=DAYS,
    show_default=True,
    help="Days for which the certificate is valid.",
)
def init(names: tuple[str, ...], folder: Path, days: int) -> int:
    """
    Create a local CA (ca.pem) and a certificate of the aggregator (cert.pem, key.pem) for NAMEs: the host names and
    addresses by which nodes and hooks reach it. This machine's own names and loopback are always included.

    Run it again to renew the certificate or to change its names: an existing CA is kept, so clients need no new one.
    Needs the program openssl.

    Exit code 0: created. 2: an invalid name, a folder that cannot be written, or no openssl.
    """
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError("openssl is not installed: install your distribution's package openssl")
    wanted = _alternatives((*names, *own_names()))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = [(folder / name).is_file() for name in (CA, CA_KEY)]
        if any(kept) and not all(kept):
            there, missing = (CA, CA_KEY) if kept[0] else (CA_KEY, CA)
            raise ConfigError(f"{folder}: contains {there} but not {missing}; name another folder with --dir")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tls-") as name:
            draft = Path(name)
            if not all(kept):
                _make_authority(program, draft)
            else:
                for file in (CA, CA_KEY):
                    shutil.copyfile(folder / file, draft / file)
            _make_certificate(program, draft, wanted, days)
            for file in (KEY, CERTIFICATE) if all(kept) else (CA_KEY, CA, KEY, CERTIFICATE):
                (draft / file).chmod(0o600 if file in (KEY, CA_KEY) else 0o644)
                (draft / file).replace(folder / file)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {words_of(error)}; name another with --dir") from None
    _say(folder, wanted, days, kept=all(kept))
    return 0


def own_names() -> tuple[str, ...]:
    """What this machine is called by itself, by others, and by its own processes."""
    from healthd.hooks.launchers import own_address

    found = (socket.gethostname(), socket.getfqdn(), own_address())
    return (*(name for name in dict.fromkeys(found) if _is_address(name) or _NAME.fullmatch(name)), *LOOPBACK)


def _alternatives(names: Sequence[str]) -> tuple[str, ...]:
    """`DNS:head`, `IP:10.0.0.1`, each once; ConfigError for what is neither a host name nor an address."""
    found = []
    for name in names:
        if _is_address(name):
            found.append(f"IP:{name}")
        elif _NAME.fullmatch(name):
            found.append(f"DNS:{name}")
        else:
            raise ConfigError(f"{name[:80]!r} is neither a host name nor an IP address; write head or 10.0.0.1")
    return tuple(dict.fromkeys(found))


def _is_address(text: str) -> bool:
    """Not one with a zone (`fe80::1%eth0`): it means something on one host alone, and no certificate can have it."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _make_authority(program: str, draft: Path) -> None:
    words = {"subject": f"healthd local CA {secrets.token_hex(4)}", "names": "DNS:localhost"}
    (draft / "config").write_text(_CONFIG.format_map(words), encoding="ascii")
    _run(
        *(program, "req", "-x509", "-new", "-sha256", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-config", str(draft / "config"), "-extensions", "ca", "-days", str(CA_DAYS)),
        *("-keyout", str(draft / CA_KEY), "-out", str(draft / CA)),
    )


def _make_certificate(program: str, draft: Path, names: Sequence[str], days: int) -> None:
    words = {"subject": "healthd aggregator", "names": ",".join(names)}
    config, request = str(draft / "config"), str(draft / "request")
    (draft / "config").write_text(_CONFIG.format_map(words), encoding="ascii")
    _run(
        *(program, "req", "-new", "-sha256", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-config", config, "-keyout", str(draft / KEY), "-out", request),
    )
    _run(
        *(program, "x509", "-req", "-sha256", "-in", request, "-CA", str(draft / CA), "-CAkey", str(draft / CA_KEY)),
        *("-set_serial", f"0x{secrets.token_hex(16)}", "-days", str(days), "-extfile", config),
        *("-extensions", "server", "-out", str(draft / CERTIFICATE)),
    )


def _run(*words: str) -> None:
    environment: Mapping[str, str] = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": os.devnull}
    try:
        code, _, err = run_program(
            words, environment=environment, timeout_seconds=OPENSSL_SECONDS, max_bytes=MAX_OUTPUT_BYTES
        )
    except TimeUpError:
        raise HealthdError(f"{words[0]} {words[1]} did not finish within {OPENSSL_SECONDS:g} s; try again") from None
    if code != 0:
        last = (err.decode("utf-8", "replace").strip().splitlines() or [f"exit code {code}"])[-1]
        raise HealthdError(f"{words[0]} {words[1]} failed: {last}")


def _say(folder: Path, names: Sequence[str], days: int, *, kept: bool) -> None:
    shown = ", ".join(name.partition(":")[2] for name in names)
    click.echo(f"{folder / CA}: the CA, {'kept as it was' if kept else 'new'}; nodes and hooks name it with --ca-file")
    click.echo(f"{folder / CA_KEY}: the CA's key; it signs the next certificate, keep it where only you can read it")
    click.echo(f"{folder / CERTIFICATE}, {folder / KEY}: the aggregator, for {days} days, as {shown}")
    click.echo(f"healthd aggregator --tls-cert {folder / CERTIFICATE} --tls-key {folder / KEY} ...")
