"""Where to listen, as operators write it. Apart from the web server, which every command would have to import."""

from __future__ import annotations

from healthd.errors import ConfigError, HealthdError


class ListenError(HealthdError):
    """An address or socket path that cannot be listened on."""


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `:PORT` or `[V6]:PORT`; ConfigError says what would be right."""
    host, colon, port = listen.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
        raise ConfigError(f"listen: {listen!r} is not HOST:PORT; write 127.0.0.1:8080 or [::1]:8080")
    return bare or "0.0.0.0", int(port)  # noqa: S104  (no host means all of them, as everywhere)
