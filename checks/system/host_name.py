"""The node's own name: collectives bind to the address that it resolves to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Measurement, Status, check
from checks.host.machine import Host, HostError
from checks.system.bounds import is_required


@dataclass(frozen=True)
class Params:
    """What is asked of the address."""

    allow_loopback: bool = True  # False where ranks on other nodes connect by this name
    required: bool | None = None  # None: everywhere but on plain CPU nodes, where a wrong name is a warning


@check(tier="passive", interval_seconds=300, timeout_seconds=5)
def host_name(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The node's name resolves to one of its own addresses.

    Reads:   the host name, its resolution, /proc/net/fib_trie and /proc/net/if_inet6 (the addresses held here).
    Judges:  fail NameResolution (warn on plain CPU nodes) | unknown Timeout (no answer), NoData (no addresses known).
    Cost:    one look-up of the system's resolver, cut off after 3 s; harmless to jobs.
    """
    name = ctx.host.host_name()
    status = Status.FAIL if is_required(ctx, ctx.params.required) else Status.WARN
    try:
        found = ctx.host.resolve(name)
    except HostError as error:
        if error.reason != "NoData":
            raise
        text = f"{error}; add it to /etc/hosts or DNS"
        yield Finding(status=status, reason="NameResolution", message=text, target="node")
        return
    addresses = {parse_address(text) for text in found} - {None}
    loopback = {address for address in addresses if address and is_loopback(address)}
    # Addresses are read only where they matter: not every container shows them.
    held = loopback | (addresses & read_addresses(ctx.host) if addresses - loopback else set())
    shown = ", ".join(found[:4])
    if not held:
        text = f"{name} resolves to {shown}, which is not an address of this host"
        yield Finding(status=status, reason="NameResolution", message=text, target="node")
    elif held == loopback and not ctx.params.allow_loopback:
        text = f"{name} resolves only to {shown}, which other nodes cannot reach"
        yield Finding(status=status, reason="NameResolution", message=text, target="node")
    else:
        count = Measurement(
            name="host_name_addresses_count", value=float(len(held)), lower=None, upper=None, origin="none"
        )
        text = f"{name} resolves to {shown}; addresses of this host among them: {len(held)}"
        yield Finding(status=Status.PASS, reason=None, message=text, target="node", measurements=(count,))


def read_addresses(host: Host) -> set[str | None]:
    """The addresses of this host's interfaces. Source of the formats: net/ipv4/fib_trie.c, net/ipv6/addrconf.c."""
    held = parse_fib_trie(host.read("/proc/net/fib_trie"))
    try:
        text = host.read("/proc/net/if_inet6")
    except HostError:  # IPv6 is switched off
        text = ""
    return {*held, *parse_if_inet6(text)}


def parse_fib_trie(text: str) -> set[str]:
    """The leaves `|-- 192.0.2.2` above `/32 host LOCAL`."""
    held: set[str] = set()
    leaf = ""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["|--"] and len(words) > 1:
            leaf = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and leaf:
            held.add(leaf)
    return held


def parse_if_inet6(text: str) -> set[str]:
    """Lines that begin with an address in 32 hexadecimal digits."""
    held = set()
    for line in text.splitlines():
        digits = (line.split() or [""])[0]
        address = parse_address(":".join(digits[i : i + 4] for i in range(0, 32, 4))) if len(digits) == 32 else None
        if address:
            held.add(address)
    return held


def parse_address(text: str) -> str | None:
    """An address in its shortest form, without its zone (`fe80::1%eth0`); None for what is none."""
    import socket  # not ipaddress, which takes three times as long to load

    plain = text.partition("%")[0]
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return socket.inet_ntop(family, socket.inet_pton(family, plain))
        except (OSError, ValueError):
            continue
    return None


def is_loopback(address: str) -> bool:
    """Of an address in its shortest form."""
    return address == "::1" or address.startswith("127.")
