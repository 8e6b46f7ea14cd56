"""What crosses the daemon's socket, as frozen dataclasses that check themselves.

Layer 0: the client builds these, the daemon's `api` parses them; both sides share the one
definition. `from_json` refuses unknown fields and wrong types, so that a client can ask for nothing
the schema does not name (no host path, kernel argument or VMM flag is in it).
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from cantelop_kernels.errors import BadRequest

MAX_ENV = 48 * 1024
"""Bytes of all that a request passes into the guest, as JSON: it has to fit a control frame."""

_SCHEME = re.compile(r"hmac-[a-z0-9_]{1,32}")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Schema:
    """JSON to dataclass and back, strictly. Nested schemas and lists of plain values are known."""

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Raises BadRequest naming the field at fault."""
        if not isinstance(body, dict):
            raise BadRequest(f"{cls.__name__}: a JSON object is wanted")
        hints = typing.get_type_hints(cls)
        unknown = sorted(body.keys() - hints.keys())
        if unknown:
            raise BadRequest(f"{cls.__name__}: unknown field {', '.join(map(str, unknown))}")
        values = {name: _coerce(name, hints[name], value) for name, value in body.items()}
        try:
            made = cls(**values)
        except TypeError as error:
            raise BadRequest(f"{cls.__name__}: a field is missing", detail=str(error)) from error
        made.check()
        return made

    def check(self) -> None:
        """Rules beyond types; raises BadRequest."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]


def _coerce(name: str, hint: Any, value: object) -> Any:
    if isinstance(value, str):
        _check_text(name, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"field {name!r} must be a finite number")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    made = value
    if origin is types.UnionType:
        inner = next(arg for arg in args if arg is not type(None))
        made = None if value is None else _coerce(name, inner, value)
    elif origin is list and isinstance(value, list):
        made = [_coerce(name, args[0], item) for item in value]
    elif origin is dict and isinstance(value, dict):
        made = {
            _coerce(name, str, key): _coerce(name, args[1], item) for key, item in value.items()
        }
    elif isinstance(hint, type) and issubclass(hint, Schema):
        made = hint.from_json(value)
    elif hint is float and type(value) is int:
        made = float(value)
    elif type(value) is not (origin or hint):
        raise BadRequest(f"field {name!r} must be {getattr(hint, '__name__', hint)}")
    return made


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"field {name!r} has half a surrogate pair in it") from None


@dataclass(frozen=True, slots=True)
class SessionRequest(Schema):
    """What a client asks for. None means: as the App says."""

    key: str
    """The connection key (HMAC) that this session's Jupyter messages are signed with."""
    app: str = "default"
    image: str | None = None
    vcpus: int | None = None
    memory_mib: int | None = None
    argv: list[str] | None = None
    """A kernel command of one's own, started as given; None is the image's own kernel."""
    extra: list[str] = field(default_factory=list)
    """Arguments added to the image's own kernel."""
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    """A folder inside the guest; one that does not exist there is passed over."""
    signature_scheme: str = "hmac-sha256"
    kernel_name: str = ""
    endpoints: str | None = None
    """Token of endpoints held from an earlier session: the new one answers at the same place."""
    allow_emulation: bool = False
    request_id: str = ""
    """Chosen by the client, to take back a request whose answer it will not wait for."""
    grace_seconds: float | None = None
    """How long the session outlives its client's process; at most, and by default, as the daemon
    is configured."""

    def check(self) -> None:
        if not _NAME.fullmatch(self.app) or (self.image and not _NAME.fullmatch(self.image)):
            raise BadRequest(
                "the name of an App or image has letters, digits and . _ : - only",
                hint="the operator's configuration names the Apps, `cantelop image ls` the images",
            )
        bad = sorted(name for name in self.env if not _ENV_NAME.fullmatch(name))
        if bad:
            raise BadRequest(f"not a name for an environment variable: {bad[0]!r}")
        texts = [*self.env, *self.env.values(), *(self.argv or []), *self.extra, self.cwd or ""]
        size = len(json.dumps([self.env, self.argv, self.extra, self.cwd, self.kernel_name]))
        if any("\0" in text for text in texts) or size > MAX_ENV:
            raise BadRequest(f"arguments and environment: no NUL, and at most {MAX_ENV} bytes")
        if not _SCHEME.fullmatch(self.signature_scheme):
            raise BadRequest("signature_scheme must be hmac- and the name of a hash")
        if self.request_id and not _NAME.fullmatch(self.request_id):
            raise BadRequest("request_id has letters, digits and . _ : - only")
        if self.argv == [] or len(self.key) > 512 or len(self.kernel_name) > 256:
            raise BadRequest("argv is empty, or the key or kernel name is too long")


@dataclass(frozen=True, slots=True)
class Endpoints(Schema):
    """Where a session's five channels are: `<ip>-1` to `<ip>-5`, transport ipc.

    They belong to the user who asked, and stay the same for every later session that is created
    with the same `token`, until they are released or their client's process ends.
    """

    token: str
    ip: str


@dataclass(frozen=True, slots=True)
class Exit(Schema):
    """How a kernel ended. `reason` is one sentence for people; sizes are in bytes."""

    reason: str
    exit_code: int | None = None
    signal: int | None = None
    oom: bool = False
    memory_limit: int = 0
    memory_peak: int = 0
    cell: str = ""
    """Message id of the cell that ran then, as far as is known."""


@dataclass(frozen=True, slots=True)
class SessionView(Schema):
    """One session as its owner sees it."""

    id: str
    app: str
    user: int
    image: str
    digest: str
    vcpus: int
    memory_mib: int
    state: str
    """starting, running, exited (the kernel ended; the sandbox is destroyed) ."""
    step: str
    """While starting: the step it is at."""
    created: float
    boot_seconds: float
    """From the claim to a kernel that listens."""
    endpoints: Endpoints
    vmm: str
    emulated: bool
    notices: list[str]
    """Lines the user must be shown, such as that emulation is no security boundary."""
    exit: Exit | None = None
    warm: bool = False
    """Whether its sandbox came from the pool."""
    ended: float | None = None
    """Seconds since the epoch, as `created`."""


@dataclass(frozen=True, slots=True)
class PoolView(Schema):
    """Warm sandboxes of one image and size. `memory_used` is in bytes, of each ready one."""

    apps: list[str]
    image: str
    digest: str
    vcpus: int
    memory_mib: int
    target: int
    ready: int
    booting: int
    failures: int
    """Boots that have failed in a row."""
    last_error: str
    retry_seconds: float
    memory_used: list[int]


@dataclass(frozen=True, slots=True)
class Usage(Schema):
    """What a session uses. Bytes and seconds; None where it cannot be told."""

    id: str
    busy: bool | None
    idle_seconds: float | None
    cpu_seconds: float
    """Of everything on the host: VMM, helper, attendant."""
    cpu_percent: float
    """Of one core, since the last time somebody asked."""
    memory: int
    """Resident on the host (PSS)."""
    guest_memory_used: int | None
    kernel_memory: int | None
    kernel_memory_limit: int | None
    disk: int
    """Blocks of the scratch disk."""
    disk_limit: int
    to_client: int
    """Through the five channels."""
    to_kernel: int
    network_in: int
    network_out: int
    throttled_seconds: float = 0.0
    """In which its CPU quota held it back; of each thread, so it can grow faster than time."""


@dataclass(frozen=True, slots=True)
class Logs(Schema):
    """The last lines of a sandbox, printable characters only, each at most a few KiB."""

    console: str
    kernel: str
    vmm: str


@dataclass(frozen=True, slots=True)
class Info(Schema):
    """The daemon itself."""

    version: str
    pid: int
    state: str
    vmm: str
    emulated: bool
    allow_emulation: bool
    sessions: int
    apps: list[str]
    pool: list[PoolView] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    """Apps that have no warm sandboxes since their image cannot be had, with the reason."""
    waiting: int = 0
    """Claims that wait for room."""
