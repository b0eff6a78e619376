"""NIXL's exceptions, by its names.

As upstream, each derives from ``Exception`` directly: code written for NIXL cannot rely on a common
base class, so there is none.

``nixlNotPostedError``         the handle has not been given to ``transfer`` yet
``nixlInvalidParamError``      the caller's mistake: indices, lengths, sides, a released handle
``nixlBackendError``           the backend failed
``nixlNotFoundError``          unknown agent, uncovered memory, or a peer re-added since
``nixlMismatchError``          metadata that is not ours or of another version
``nixlNotAllowedError``        refused: wrong secret, memory still in use, peer's metadata changed
``nixlRepostActiveError``      the handle's previous post is still active
``nixlUnknownError``           a defect of this library
``nixlNotSupportedError``      not implemented here
``nixlRemoteDisconnectError``  the peer died or closed
``nixlCancelledError``         the transfer was aborted
``nixlNoTelemetryError``       telemetry was not asked for
"""

from __future__ import annotations


class nixlNotPostedError(Exception):
    pass


class nixlInvalidParamError(Exception):
    pass


class nixlBackendError(Exception):
    pass


class nixlNotFoundError(Exception):
    pass


class nixlMismatchError(Exception):
    pass


class nixlNotAllowedError(Exception):
    pass


class nixlRepostActiveError(Exception):
    pass


class nixlUnknownError(Exception):
    pass


class nixlNotSupportedError(Exception):
    pass


class nixlRemoteDisconnectError(Exception):
    pass


class nixlCancelledError(Exception):
    pass


class nixlNoTelemetryError(Exception):
    pass
