"""Who may use which route.

Without API keys the model's routes are open; with them each request needs one, or the admin key.
Operators' routes need the admin key, or come from this machine where there is none. Probes and
metrics are always open; what the server tells of itself is open to this machine.
"""

from __future__ import annotations

import hmac
import ipaddress

from starlette.requests import HTTPConnection

from pd_cluster.config import Config
from pd_cluster.errors import Forbidden, Unauthorized

OPEN = frozenset({"/health", "/ready", "/ping", "/metrics", "/openapi.json"})
_INFO = frozenset(
    {"/server_info", "/get_server_info", "/model_info", "/get_model_info", "/version"}
)


def check_access(http: HTTPConnection, config: Config) -> None:
    """Raises Unauthorized or Forbidden."""
    path = http.url.path
    if path in OPEN:
        return
    if path == "/flush_cache" or path.startswith("/admin/"):
        _check_admin(http, config)
        return
    keys = [key for key in (*config.api_keys, config.admin_key) if key is not None]
    if not config.api_keys or (path in _INFO and _is_local(http)) or _has_key(http, *keys):
        return
    raise Unauthorized(
        "a valid API key is needed: 'Authorization: Bearer KEY'", code="invalid_api_key"
    )


def _check_admin(http: HTTPConnection, config: Config) -> None:
    if config.admin_key is not None:
        if not _has_key(http, config.admin_key):
            message = "this route needs the admin key: 'Authorization: Bearer KEY'"
            raise Unauthorized(message, code="invalid_api_key")
    elif not _is_local(http):
        message = "without an admin key this route is for loopback only"
        raise Forbidden(message, code="forbidden")


def bearer_key(http: HTTPConnection) -> bytes:
    """What the client gave as its key; empty where it gave none."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else b""


def _has_key(http: HTTPConnection, *keys: str) -> bool:
    given = bearer_key(http)
    # All are compared, so that the time tells nothing.
    return sum(hmac.compare_digest(given, each.encode()) for each in keys) > 0


def _is_local(http: HTTPConnection) -> bool:
    try:
        address = ipaddress.ip_address(http.client.host if http.client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
