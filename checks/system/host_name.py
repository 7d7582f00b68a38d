"""The node's own name: collectives bind to the address that it resolves to."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Status, check
from checks.host import HostError


@dataclass(frozen=True)
class Params:
    """What is asked of the address."""

    allow_loopback: bool = True  # False where ranks on other nodes connect by this name


@check(tier="passive", interval_seconds=300, timeout_seconds=5)
def host_name(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The node's name resolves to an address that it holds.

    Reads:   the host name, its resolution, /proc/net/fib_trie and /proc/net/if_inet6 (the addresses held here).
    Judges:  fail NameResolution | unknown NoData (addresses cannot be read).
    Cost:    one look-up of the system's resolver, cut off by the time limit; harmless to jobs.
    """
    name = ctx.host.host_name()
    try:
        found = ctx.host.resolve(name)
    except HostError as error:
        text = f"{error}; put it into /etc/hosts or the DNS"
        yield Finding(status=Status.FAIL, reason="NameResolution", message=text, target="node")
        return
    held = local_addresses(ctx)
    mine = [
        address for address in found if _plain(address) in held or ipaddress.ip_address(_plain(address)).is_loopback
    ]
    usable = [address for address in mine if not ipaddress.ip_address(_plain(address)).is_loopback]
    if not mine:
        status, reason = Status.FAIL, "NameResolution"
        text = f"{name} resolves to {', '.join(found[:4])}, which this host does not hold"
    elif not usable and not ctx.params.allow_loopback:
        status, reason = Status.FAIL, "NameResolution"
        text = f"{name} resolves to {', '.join(mine[:4])} alone, where no other node can reach it"
    else:
        yield Finding(
            status=Status.PASS,
            reason=None,
            message=f"{name} resolves to {', '.join(mine[:4])}, held here",
            target="node",
        )
        return
    yield Finding(status=status, reason=reason, message=text, target="node")


def local_addresses(ctx: Context[Params]) -> set[str]:
    """The addresses of this host's interfaces. Source of the formats: Linux, net/ipv4/fib_trie.c, net/ipv6/addrconf.c."""
    held: set[str] = set()
    candidate = ""
    for line in ctx.host.read("/proc/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] == ["|--"] and len(words) > 1:
            candidate = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"]:
            held.add(candidate)
    try:
        text = ctx.host.read("/proc/net/if_inet6")
    except HostError:  # IPv6 is switched off
        text = ""
    for line in text.splitlines():
        digits = line.split()[0] if line.split() else ""
        if len(digits) == 32:
            held.add(str(ipaddress.IPv6Address(int(digits, 16))))
    return held


def _plain(address: str) -> str:
    """An address without its zone (`fe80::1%eth0`), in its shortest form."""
    return str(ipaddress.ip_address(address.partition("%")[0]))
