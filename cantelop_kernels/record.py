"""What a later daemon needs to know of a live session, beside its sandbox on the disk.

Layer 2. Written once the session's kernel answers, removed before its sandbox is destroyed: what
has no record when a daemon starts is destroyed. The folder can be changed by root alone, so the
record is trusted; it holds no key and no environment of the user.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels.errors import BadRequest
from cantelop_kernels.process import Identity
from cantelop_kernels.schema import Endpoints, Schema

_FILE = "session.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Running(Schema):
    """A process of the sandbox: its pid, its start in clock ticks since boot, and its uid."""

    pid: int
    start: int
    uid: int

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.start)

    @classmethod
    def of(cls, pid: int) -> Running:
        """Raises ProcessLookupError where it has ended."""
        try:
            uid = Path(f"/proc/{pid}").stat().st_uid
        except FileNotFoundError:
            raise ProcessLookupError(pid) from None
        return cls(pid, Identity.of(pid).start, uid)

    def alive(self) -> bool:
        """Whether it is that process still, under that uid."""
        try:
            owner = Path(f"/proc/{self.pid}").stat().st_uid
            return owner == self.uid and Identity.of(self.pid) == self.identity
        except (FileNotFoundError, ProcessLookupError):
            return False


@dataclass(frozen=True, slots=True)
class SessionRecord(Schema):
    """Times are seconds since the epoch; sizes in MiB; `client_*` is the lease's process."""

    version: int
    id: str
    slot: int
    user: int
    group: int
    app: str
    request_id: str
    image: str
    digest: str
    vcpus: int
    memory_mib: int
    scratch_mib: int
    created: float
    boot_seconds: float
    warm: bool
    notices: list[str]
    endpoints: Endpoints
    grace: float
    client_pid: int
    client_start: int
    attendant: Running
    machine: Running
    helpers: dict[str, Running]
    run_at: str = "run"
    """Of its `Jail`: the next daemon may be configured for another VMM."""

    def alive(self) -> bool:
        """Whether every process of its sandbox still runs."""
        return all(one.alive() for one in (self.attendant, self.machine, *self.helpers.values()))


def save(folder: Path, record: SessionRecord) -> None:
    """Whole or not at all; replaces an earlier one. Raises OSError where the disk is full."""
    aside = folder / f".{_FILE}"
    fd = os.open(aside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(record.to_json(), file)
    aside.rename(folder / _FILE)


def load(folder: Path) -> SessionRecord | None:
    """None where there is none that this version understands."""
    try:
        body = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        record = SessionRecord.from_json(body)
    except (OSError, ValueError, BadRequest):
        return None
    return record if record.version == VERSION else None


def remove(folder: Path) -> None:
    """From here on nobody adopts it. Idempotent."""
    (folder / _FILE).unlink(missing_ok=True)
