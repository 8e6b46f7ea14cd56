"""The user database: sandboxes' uids must be nobody else's.

Layer 6, part of `preflight`. The reaper kills every process of the range when a daemon starts, and
every sandbox's files and processes are open to whoever has its uid.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterable
from pathlib import Path

from cantelop_kernels.preflight.model import Check, text_of

NAME = "uids"

_SHOWN = 3


def host_users() -> list[tuple[str, int]]:
    """Name and uid of all that the user database lists (nsswitch.conf: it may not list all)."""
    return [(one.pw_name, one.pw_uid) for one in pwd.getpwall()]


def host_groups() -> list[tuple[str, int]]:
    """Name and gid, likewise."""
    return [(one.gr_name, one.gr_gid) for one in grp.getgrall()]


def uids(
    ours: range,
    users: Iterable[tuple[str, int]],
    groups: Iterable[tuple[str, int]],
    etc: Path = Path("/etc"),
) -> Check:
    """Whether `ours` (`slot.uid_range`) is free: of users, of groups, and of what users may map."""
    taken = [f"user {name} ({number})" for name, number in users if number in ours]
    taken += [f"group {name} ({number})" for name, number in groups if number in ours]
    says = f"{ours.start} to {ours.stop - 1}"
    if taken:
        return Check(
            NAME,
            "fail",
            f"{_few(taken)}: within {says}, the ids that sandboxes run under",
            "set uid_base to a range that nobody has",
        )
    mapped = [
        f"{owner} ({name})"
        for name in ("subuid", "subgid")
        for owner, numbers in subordinate(text_of(etc / name))
        if overlap(numbers, ours)
    ]
    if mapped:
        return Check(
            NAME,
            "warn",
            f"{_few(mapped)} may use ids within {says}, which sandboxes run under, in containers",
            "set uid_base to a range that is not in /etc/subuid and /etc/subgid",
        )
    return Check(NAME, "ok", f"{says} are sandboxes' alone")


def subordinate(text: str) -> list[tuple[str, range]]:
    """Owner and ids of each line of /etc/subuid or /etc/subgid (subuid(5)); others are passed
    over."""
    found = []
    for line in text.splitlines():
        owner, *numbers = line.strip().split(":")
        if len(numbers) == 2 and all(one.isdecimal() and one.isascii() for one in numbers):
            first, count = int(numbers[0]), int(numbers[1])
            found.append((owner, range(first, first + count)))
    return found


def overlap(one: range, other: range) -> bool:
    """Whether two ranges (of step 1) have a number in common."""
    return max(one.start, other.start) < min(one.stop, other.stop)


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
