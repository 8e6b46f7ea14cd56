"""The byte relay: nothing lost, nothing reordered, bounded, and both sides end together."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from cantelop_kernels.relay import Relay

Ends = tuple[socket.socket, socket.socket, Relay, asyncio.Event]


def joined(to_left: int = 4096, to_right: int = 4096) -> Ends:
    left, inner_left = socket.socketpair()
    right, inner_right = socket.socketpair()
    for sock in (left, right, inner_left, inner_right):
        sock.setblocking(False)
    closed = asyncio.Event()
    relay = Relay(
        asyncio.get_running_loop(),
        inner_left,
        inner_right,
        to_left=to_left,
        to_right=to_right,
        on_close=lambda _: closed.set(),
    )
    return left, right, relay, closed


async def read_all(sock: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(sock, 65536)
        assert part, "ended too early"
        data += part
    return data


@pytest.mark.parametrize("size", [1, 4096, 4097, 3_000_000])
async def test_bytes_pass_both_ways_unchanged(size: int) -> None:
    left, right, relay, _ = joined()
    loop = asyncio.get_running_loop()
    for here, there in ((left, right), (right, left)):
        data = os.urandom(size)
        got, _ = await asyncio.gather(read_all(there, size), loop.sock_sendall(here, data))
        assert got == data
    relay.close()
    left.close()
    right.close()


async def test_a_slow_reader_holds_the_sender_back() -> None:
    left, right, relay, _ = joined()
    sent = 0
    for _ in range(2000):  # nobody reads `right`
        try:
            sent += left.send(b"x" * 4096)
        except BlockingIOError:
            await asyncio.sleep(0)
    assert sent < 2_000_000  # two socket buffers and one chunk, however much is offered
    assert len(await read_all(right, sent)) == sent
    relay.close()
    left.close()
    right.close()


async def test_the_end_of_one_side_ends_the_other_after_the_last_byte() -> None:
    left, right, _, closed = joined()
    left.send(b"last words")
    left.close()
    async with asyncio.timeout(2):
        await closed.wait()
    assert right.recv(100) == b"last words"
    assert right.recv(100) == b""
    right.close()


async def test_closing_twice_is_harmless() -> None:
    left, right, relay, closed = joined()
    relay.close()
    relay.close()
    assert closed.is_set()
    assert left.recv(1) == b""
    left.close()
    right.close()


async def test_one_send_is_never_over_its_cap() -> None:
    """vhost-device-vsock loses what a guest sends in one piece of 64 KiB or more."""
    sizes: list[int] = []

    class Recording(socket.socket):
        def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
            sizes.append(len(data))
            return super().send(data, flags)

    left, inner_left = socket.socketpair()
    right, inner_right = socket.socketpair()
    recording = Recording(fileno=inner_right.detach())
    for sock in (left, right, inner_left, recording):
        sock.setblocking(False)
    relay = Relay(
        asyncio.get_running_loop(),
        inner_left,
        recording,
        to_left=1 << 20,
        to_right=32768,
        on_close=lambda _: None,
    )
    data = os.urandom(1_000_000)
    loop = asyncio.get_running_loop()
    got, _ = await asyncio.gather(read_all(right, len(data)), loop.sock_sendall(left, data))
    assert got == data
    assert max(sizes) <= 32768
    relay.close()
    left.close()
    right.close()
