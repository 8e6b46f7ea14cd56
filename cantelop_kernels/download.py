"""One file, from this host or by HTTP, copied with its digest taken on the way.

Layer 1. Redirects are followed (to http and https only), proxies and certificates are those of this
host's environment (urllib). The caller says how large it may be, and compares the digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib import error, request

from cantelop_kernels.errors import ToolError

_CHUNK = 1 << 20
_SILENCE = 20.0
"""Seconds that a server may say nothing."""


async def fetch(source: str, into: IO[bytes], *, limit: int) -> str:
    """Copy a file, or what an http(s) URL gives, to `into`; returns its SHA-256 in hex.

    Raises ToolError where it cannot be had or is larger than `limit` bytes; OSError where `into`
    cannot be written.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(_fetch, source, into, limit, stop)
    finally:
        stop.set()  # a thread cannot be cancelled; this one looks at every piece


def _fetch(source: str, into: IO[bytes], limit: int, stop: threading.Event) -> str:
    with _opened(source) as stream:
        digest = hashlib.sha256()
        while not stop.is_set() and (piece := _piece(stream, source)):
            digest.update(piece)
            if into.tell() + len(piece) > limit:
                raise ToolError(f"{source} is larger than {limit >> 20} MiB")
            into.write(piece)
        into.flush()
        return digest.hexdigest()


def _piece(stream: IO[bytes], source: str) -> bytes:
    try:
        return stream.read(_CHUNK)
    except (OSError, ValueError, HTTPException) as problem:
        raise _unreachable(source, problem) from problem


def _opened(source: str) -> IO[bytes]:
    try:
        if source.startswith(("http://", "https://")):
            return _http().open(source, timeout=_SILENCE)  # type: ignore[no-any-return]
        return Path(source).open("rb")
    except (OSError, ValueError, HTTPException) as problem:
        raise _unreachable(source, problem) from problem


def _http() -> request.OpenerDirector:
    """Without the handlers for files and FTP that `urlopen` has, for who redirects there."""
    opener = request.OpenerDirector()
    for handler in (
        *(request.ProxyHandler(), request.HTTPHandler(), request.HTTPSHandler()),
        *(request.HTTPRedirectHandler(), request.UnknownHandler()),
        *(request.HTTPErrorProcessor(), request.HTTPDefaultErrorHandler()),
    ):
        opener.add_handler(handler)
    return opener


def _unreachable(source: str, problem: Exception) -> ToolError:
    reason = getattr(problem, "reason", None) if isinstance(problem, error.URLError) else None
    why = str(reason or getattr(problem, "strerror", None) or problem)
    return ToolError(f"cannot read {source}: {why}", hint="see whether it is there, and complete")
