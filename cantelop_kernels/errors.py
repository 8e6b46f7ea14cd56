"""One tree of errors, classed by what the caller can do next, each with a hint.

Layer 0. Every error has a stable `code` (it crosses the daemon's API as JSON and is raised again
as the same class in the client), a one-line `message` and a `hint` that says what to do.
Foreign exceptions are translated to these at the boundary where they appear.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CantelopError(Exception):
    """Base of everything this project raises on purpose.

    `details` must be JSON-serialisable; it travels with the error through the API.
    """

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def to_json(self) -> dict[str, Any]:
        """The body of an API error answer; `from_json` is its inverse."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "details": self.details,
        }


class BadRequest(CantelopError):
    """What was asked is malformed or not allowed by the schema: fix the input."""

    code, http_status = "bad_request", 400


class ConfigError(BadRequest):
    """The configuration file or a setting is wrong: fix it and start again."""

    code = "config"


class NotFound(CantelopError):
    """No such thing, or it belongs to someone else (the two are not told apart)."""

    code, http_status = "not_found", 404


class PermissionRefused(CantelopError):
    """The caller may not do this: ask the operator."""

    code, http_status = "refused", 403


class EmulationRefused(PermissionRefused):
    """No hardware virtualization, and emulation was not allowed explicitly."""

    code = "emulation_refused"


class ImageError(CantelopError):
    """An image is missing, corrupt, or could not be built: build it (again)."""

    code, http_status = "image", 422


class ToolError(CantelopError):
    """A program that sandboxes need is missing, not to be trusted, or could not be installed."""

    code, http_status = "tool", 422


class DaemonUnavailable(CantelopError):
    """Nobody answers on the daemon's socket: start it, then try again.

    `details` has `stopped`: whether the socket is gone as well, which only a daemon that was
    stopped in order takes away.
    """

    code, http_status = "daemon_unavailable", 503


class Exhausted(CantelopError):
    """No slot, memory or time left for another sandbox: try again later."""

    code, http_status = "exhausted", 503


class LaunchError(CantelopError):
    """A sandbox did not come up. `details` has `step` and `console` (the guest's last lines)."""

    code, http_status = "launch_failed", 502


class SandboxGone(CantelopError):
    """The sandbox ended while something was still wanted from it."""

    code, http_status = "sandbox_gone", 410


class OutOfMemory(SandboxGone):
    """The kernel was killed for want of memory. `details` has `limit` and `peak`, in bytes."""

    code = "out_of_memory"


class DeadlineExceeded(CantelopError):
    """Something did not happen in time; it was undone, so trying again is safe."""

    code, http_status = "deadline", 504


class OutcomeUnknown(CantelopError):
    """The connection broke before the answer came: look (`cantelop ps`) before trying again."""

    code, http_status = "unknown", 502


class NotebookError(CantelopError):
    """The notebook itself is missing, invalid, or a cell of it failed."""

    code, http_status = "notebook", 422


def _tree(cls: type[CantelopError]) -> dict[str, type[CantelopError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


def from_json(body: dict[str, Any]) -> CantelopError:
    """The error an API answer describes, as the class it had in the daemon."""
    cls = _tree(CantelopError).get(str(body.get("code")), CantelopError)
    details = body.get("details")
    error = cls(str(body.get("message", "unknown error")), hint=str(body.get("hint", "")))
    error.details = details if isinstance(details, dict) else {}
    return error
