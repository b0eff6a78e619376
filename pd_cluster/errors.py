"""Errors that callers of pd-cluster can meet.

PdClusterError
├── ConfigError               a config key, CLI option or its value is wrong (exit code 2)
├── ModelError                a model folder, file or id cannot be served (exit code 2)
├── StartError                the cluster cannot start: port taken, Ray not reachable (exit code 2)
├── WireError                 a message from another process cannot be understood
├── InvalidTransition         an illegal move of a state machine (our bug); carries the story
└── RequestError              one request cannot be served; carries an HTTP status
    ├── BadRequest            400, names the parameter
    │   ├── BodyTooSlow       408
    │   └── PayloadTooLarge   413
    ├── Unauthorized          401, a key is missing or wrong
    ├── Forbidden             403, not from there
    ├── NotFound              404
    ├── Overloaded            429, with `retry_after` seconds
    ├── Unavailable           503, with `retry_after` seconds
    ├── DeadlineExceeded      504
    └── AttemptsExhausted     500, every try at the request failed
"""

from __future__ import annotations

from collections.abc import Sequence


class PdClusterError(Exception):
    """The root of all errors that this package raises for its callers."""


class ConfigError(PdClusterError):
    """A config key, CLI option or its value is wrong; the message names it and what is allowed."""


class ModelError(PdClusterError):
    """A model cannot be loaded; the message names the file, tensor or field."""


class StartError(PdClusterError):
    """The cluster cannot start; one clear line."""


class WireError(PdClusterError):
    """Bytes from another process are no message that this version knows."""


class InvalidTransition(PdClusterError):
    """A state machine was asked for a move that its transition table does not have."""

    def __init__(self, who: str, start: str, finish: str, story: Sequence[object] = ()) -> None:
        self.story = list(story)
        lines = "".join(f"\n  {entry}" for entry in self.story)
        super().__init__(
            f"{who}: no transition from {start!r} to {finish!r}; story:{lines or ' none'}"
        )


class RequestError(PdClusterError):
    """One request cannot be served.

    `param` names the request field at fault, `code` is a short machine-readable word, as in
    OpenAI's errors.
    """

    status = 500
    kind = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


class BadRequest(RequestError):
    status = 400
    kind = "invalid_request_error"


class BodyTooSlow(BadRequest):
    status = 408


class PayloadTooLarge(BadRequest):
    status = 413


class Unauthorized(RequestError):
    status = 401
    kind = "invalid_request_error"


class Forbidden(RequestError):
    status = 403
    kind = "invalid_request_error"


class NotFound(RequestError):
    status = 404
    kind = "not_found_error"


class Overloaded(RequestError):
    status = 429
    kind = "rate_limit_error"


class Unavailable(RequestError):
    status = 503
    kind = "service_unavailable"


class DeadlineExceeded(RequestError):
    status = 504
    kind = "timeout_error"


class AttemptsExhausted(RequestError):
    status = 500
    kind = "server_error"
