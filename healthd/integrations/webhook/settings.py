"""Settings of the webhook: `webhook_url` and `webhook_token_file` under `[aggregator]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from healthd.aggregator.identity.tokens import is_loopback
from healthd.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WebhookSettings:
    """Where ends of jobs are sent. ConfigError names what cannot work together."""

    url: str | None = None
    """URL that receives a CloudEvent (1.0, structured JSON) for each job that died; see docs/postmortem.md. None: no
    event is sent."""

    token_file: Path | None = None
    """File with a bearer token for that URL; None sends none."""

    def __post_init__(self) -> None:
        if self.url is None:
            if self.token_file is not None:
                raise ConfigError("webhook_token_file goes with webhook_url; set it too")
            return
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError("webhook_url must be http:// or https:// with a host")
        if self.token_file is not None and url.scheme == "http" and not is_loopback(url.hostname):
            raise ConfigError("webhook_url must be https:// where a token is sent to another host")
