"""The control channel between the host's attendant and the guest's agent.

Layer 0, shared with the guest: standard library only, and only its light modules, because the
guest imports this under emulation before anything else can happen.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, one object, at most
`MAX_FRAME` bytes. Every object has a `type`; its other fields are those of `FROM_GUEST` or
`TO_GUEST`, no more and no fewer, so that whatever passes on from a guest is small and known.

Ports (vsock):

- the guest's agent dials the host (CID 2) on `CONTROL_PORT` and says `hello` first;
- it dials `LOG_PORT` for the raw bytes that the kernel process writes to its stdout and stderr;
- the host dials the guest on `CHANNEL_PORTS[name]`, one connection per client connection, and the
  bytes of the kernel's own socket follow. The agent listens there only once the kernel does.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

VERSION = 3
HOST_CID = 2
GUEST_CID = 3
CONTROL_PORT = 1024
LOG_PORT = 1025
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
CHANNEL_PORTS = {name: 2001 + index for index, name in enumerate(CHANNELS)}
"""In the order of jupyter_client's `port_names`; ipc endpoint suffixes are 1 to 5, likewise."""

MAX_FRAME = 64 * 1024
MAX_GUEST_WRITE = 32 * 1024
"""vhost-device-vsock 0.3.0 loses a guest's send() of about 64 KiB and more; stay at half."""

MAX_FLOAT = 1e12
"""NaN and infinity do not get through: they are no JSON, but Python writes and reads them."""

_STR = (str,)
_INT = (int,)
_NUMBER = (float, int)
_OPT_STR = (str, type(None))
_OPT_INT = (int, type(None))

FROM_GUEST: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    # once, first: who the guest is
    "hello": {
        "version": _INT,
        "boot_id": _STR,
        "release": _STR,
        "memory": _INT,  # bytes the guest kernel sees
        "vcpus": _INT,
    },
    # the kernel is started, exercised, and waits for `bind`; after `warm_up`, at most once
    "warm": {"memory_used": _INT},  # bytes in use in the whole guest
    # the kernel listens on all its sockets, and the relay ports are open
    "ready": {"pid": _INT},
    # the kernel process ended, at most once; also one that has been warmed up, before any `bind`;
    # exactly one of exit_code and signal is set; sizes in bytes
    "exited": {
        "exit_code": _OPT_INT,
        "signal": _OPT_INT,
        "oom": (bool,),
        "memory_limit": _INT,
        "memory_peak": _INT,
        "cell": _STR,  # message id of the cell that ran then; empty where none did
    },
    # answers to requests, by their id
    "done": {"id": _INT},
    "failed": {"id": _INT, "reason": _STR},
    "status": {
        "id": _INT,
        "state": _STR,  # "waiting", "running" or "exited"
        "memory_limit": _INT,
        "memory_current": _INT,
        "memory_peak": _INT,
        "memory_used": _INT,  # bytes in use in the whole guest
        "cpu_seconds": _NUMBER,  # that the kernel and its children have used
        "busy": (bool, type(None)),  # a cell runs; None where nobody knows (its own argv)
        "cell": _STR,  # message id of the one that runs; empty where none does
        "idle_seconds": _NUMBER,  # since the last cell ended, or since `bind`; 0 where busy
        "uptime": _NUMBER,
    },
}

TO_GUEST: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    # start and exercise the image's own kernel ahead of `bind`; answered by done, later by warm
    "warm_up": {"id": _INT},
    # everything a sandbox is given, at once; answered by done, then ready (or exited)
    "bind": {
        "id": _INT,
        "argv": (list, type(None)),  # None: the image's own kernel, already loaded
        "extra": (list,),  # arguments added to the image's own kernel
        "env": (dict,),
        "cwd": _OPT_STR,
        "key": _STR,
        "signature_scheme": _STR,
        "kernel_name": _STR,
        "hostname": _STR,
        "time_ns": _INT,  # host's clock, nanoseconds since the epoch
        "entropy": _STR,  # hex
    },
    "signal": {"id": _INT, "signum": _INT},  # to the kernel's process group
    "status_request": {"id": _INT},
    "poweroff": {"id": _INT},
}


ANSWERS = {"status_request": "status"}
"""What answers a request where it is not `done`; `failed` may always come."""


class WireError(Exception):
    """A frame that breaks the rules above; the connection it came on is of no more use."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame. Raises WireError where the message would be over `MAX_FRAME`."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


def check(message: object, schemas: Mapping[str, Mapping[str, tuple[type, ...]]]) -> dict[str, Any]:
    """The message itself, if it is one of `schemas` to the letter; else WireError."""
    if not isinstance(message, dict):
        raise WireError("a frame that is not a JSON object")
    kind = message.get("type")
    schema = schemas.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise WireError(f"unknown message type {str(kind)[:40]!r}")
    if message.keys() - {"type"} != schema.keys():
        raise WireError(f"the fields of {message['type']!r} are not those of its schema")
    for field, types in schema.items():
        value = message[field]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise WireError(f"{message['type']}.{field} has the wrong type")
        if isinstance(value, float) and not abs(value) < MAX_FLOAT:
            raise WireError(f"{message['type']}.{field} is out of range")
    return message


class Decoder:
    """Cuts a byte stream into frames: feed it what arrived, take the messages out."""

    def __init__(self, schemas: Mapping[str, Mapping[str, tuple[type, ...]]]) -> None:
        self._schemas = schemas
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Every message now complete. Raises WireError on a frame that is too long or not valid."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            yield check(_parse(body), self._schemas)


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON: {type(error).__name__}") from error
