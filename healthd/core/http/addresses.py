"""Addresses as operators and clients write them. Apart from the web server, which every command would import."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from healthd.core.errors import BadInputError, ConfigError, HealthdError

MOST_AGGREGATORS = 16
"""Of one setting: more is a slip."""


class ListenError(HealthdError):
    """An address or socket path that cannot be listened on."""


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `:PORT` or `[V6]:PORT`; ConfigError says what would be right."""
    host, colon, port = listen.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
        raise ConfigError(f"listen: {listen!r} is not HOST:PORT; write 127.0.0.1:8080 or [::1]:8080")
    return bare or "0.0.0.0", int(port)  # noqa: S104  (no host means all of them, as everywhere)


def aggregators_in(text: str, *, where: str) -> tuple[str, ...]:
    """The URLs of aggregators in a text that separates them by commas, the preferred first. ConfigError."""
    urls = tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip()) or ("",)
    if len(urls) > MOST_AGGREGATORS:
        raise ConfigError(f"{where}: {len(urls)} addresses are too many; at most {MOST_AGGREGATORS} are allowed")
    for url in urls:
        check_aggregator(url, where=where)
    return urls


def check_aggregator(url: str, *, where: str) -> None:
    """ConfigError for what is no URL of an aggregator."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: {url!r} is not a URL; write http://host:8090 or https://host:8090")


def host_of(header: str) -> str:
    """The name or address in a Host header, without its port; BadInputError for one that holds neither."""
    return split_header("Host", f"//{header}").hostname or ""


def split_header(name: str, url: str) -> SplitResult:
    """The parts of a URL out of a header; BadInputError names the header."""
    try:
        return urlsplit(url)
    except ValueError:  # as of a bracket that nobody closed
        text = url.removeprefix("//")[:80]
        raise BadInputError(f"the {name} header {text!r} contains no readable host name or address") from None
