"""Users of the daemon, by what the kernel says of a connection and the user database of a uid.

Layer 1.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel says (unix(7), SO_PEERCRED)."""

    uid: int
    gid: int
    pid: int


def listed(peer: Peer, users: Iterable[str]) -> bool:
    """Whether one of `users` (names, uids, "@group", "*") means this one."""
    names = {str(peer.uid), user_name(peer.uid), "*", *(f"@{name}" for name in groups_of(peer))}
    return not names.isdisjoint(users)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def groups_of(peer: Peer) -> list[str]:
    """Names of the groups that the user database gives to this user."""
    names = []
    for gid in os.getgrouplist(user_name(peer.uid), peer.gid):
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names
