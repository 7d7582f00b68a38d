"""Finds the address and network interface through which the ranks of this node reach other nodes. Sends nothing."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from healthd.core.errors import ConfigError

# Addresses reserved for documentation: routed like any other, so they show the default route.
_ANYWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Entry(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3), as far as it is the same everywhere on Linux."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


@dataclass(frozen=True)
class Address:
    """One address of one interface."""

    interface: str
    ip: Ip


def addresses() -> tuple[Address, ...]:
    """All addresses of this machine, in the kernel's order; none when it cannot be asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.restype = None
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return ()
    try:
        return tuple(_read(first))
    finally:
        libc.freeifaddrs(first)


def _read(entry: ctypes._Pointer[_Entry]) -> Iterator[Address]:
    while entry:
        one = entry.contents
        if one.address and one.name:
            family = ctypes.c_ushort.from_address(one.address).value
            name = one.name.decode(errors="replace")
            if family == socket.AF_INET:  # sockaddr_in: family, port, address
                yield Address(name, ipaddress.IPv4Address(ctypes.string_at(one.address + 4, 4)))
            elif family == socket.AF_INET6:  # sockaddr_in6: family, port, flow, address
                yield Address(name, ipaddress.IPv6Address(ctypes.string_at(one.address + 8, 16)))
        entry = one.next


def check_interface(name: str | None) -> None:
    """Raise ConfigError, with the names that there are, for an interface that this machine does not have."""
    names = [known for _, known in socket.if_nameindex()]
    if name is not None and name not in names:
        raise ConfigError(f"node.interface: {name!r} does not exist; choose from: {', '.join(sorted(names)) or 'none'}")


def address_of(interface: str) -> str | None:
    """The address by which an interface is reached: its first of IPv4, else a global one of IPv6; None without one."""
    own = [one.ip for one in addresses() if one.interface == interface]
    fit = [ip for ip in own if ip.version == 4] + [ip for ip in own if ip.version == 6 and not ip.is_link_local]
    return str(fit[0]) if fit else None


def peer_address(interface: str | None, url: str | None) -> str | None:
    """
    The address by which the ranks of other nodes reach those of this one; None where it is unknown.

    It is the address of the configured interface, else the one from which this machine connects to the aggregator at
    `url`. An aggregator on this machine does not show the route to others: then it is the address of the default route,
    or the first that is not loopback. This may resolve a name and take long: call it off the event loop.
    """
    if interface is not None:
        return address_of(interface)
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        source = source_to(parts.hostname or "", parts.port or 443)
    except ValueError:
        return None
    if source is None or not ipaddress.ip_address(source).is_loopback:
        return source
    for host, port in _ANYWHERE:
        if (ours := source_to(host, port)) is not None and not ipaddress.ip_address(ours).is_loopback:
            return ours
    outward = [one.ip for one in addresses() if not one.ip.is_loopback and not one.ip.is_link_local]
    return str(outward[0]) if outward else source


def source_to(host: str, port: int) -> str | None:
    """The address from which this machine connects to another; None without a route, or for an unknown name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0]).partition("%")[0]
        except OSError:
            continue  # no such family here, or no route
    return None


def interface_to(main: str) -> str | None:
    """The interface by which ranks reach the main node of a group, an IP address; None where it is unknown."""
    try:
        wanted = ipaddress.ip_address(main)
    except ValueError:
        return None
    known = addresses()
    if wanted not in [one.ip for one in known]:
        source = source_to(main, 9)
        if source is None:
            return None
        wanted = ipaddress.ip_address(source)
    elif wanted.is_loopback:
        return next((one.interface for one in known if one.ip == wanted), None)
    return next((one.interface for one in known if one.ip == wanted), None)
