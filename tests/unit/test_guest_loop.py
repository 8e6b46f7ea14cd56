"""The agent's event loop, and what runs on it without a kernel."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from cantelop_guest.control import Control
from cantelop_guest.logs import MAX_HELD, LogStream
from cantelop_guest.loop import Loop
from cantelop_guest.watch import SocketWatch
from cantelop_kernels import wire
from cantelop_kernels.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = {
    "type": "hello",
    "version": 2,
    "boot_id": "b",
    "release": "r",
    "memory": 1,
    "vcpus": 1,
}


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    yield near, far
    near.close()
    far.close()


def run_for(loop: Loop, seconds: float) -> None:
    loop.call_later(seconds, loop.stop)
    loop.run()


def test_timers_run_in_the_order_of_their_times(loop: Loop) -> None:
    ran: list[str] = []
    loop.call_later(0.02, ran.append, "second")
    loop.call_later(0.01, ran.append, "first")
    loop.call_later(0.01, ran.append, "never").cancel()
    run_for(loop, 0.05)
    assert ran == ["first", "second"]


def test_a_hung_up_peer_wakes_the_reader_and_does_not_spin_once_removed(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    calls: list[bytes] = []

    def readable() -> None:
        calls.append(near.recv(10))
        loop.remove_reader(near.fileno())

    loop.add_reader(near.fileno(), readable)
    far.close()
    before = time.process_time()
    run_for(loop, 0.3)
    assert calls == [b""]
    assert time.process_time() - before < 0.15


def test_a_callback_that_removes_another_is_obeyed_in_the_same_round(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def readable(index: int) -> None:
        called.append(index)
        for near, _ in pairs:
            loop.remove_reader(near.fileno())

    for index, (near, far) in enumerate(pairs):
        loop.add_reader(near.fileno(), readable, index)
        far.send(b"x")
    run_for(loop, 0.05)
    assert len(called) == 1
    for sock in (s for both in pairs for s in both):
        sock.close()


def test_a_relay_runs_on_this_loop(loop: Loop) -> None:
    (client, left), (right, server) = socket.socketpair(), socket.socketpair()
    closed: list[Relay] = []
    for sock in (left, right):
        sock.setblocking(False)
    Relay(loop, left, right, to_left=100, to_right=100, on_close=closed.append)
    client.sendall(b"q" * 5000)
    received = bytearray()
    server.setblocking(False)

    def collect() -> None:
        received.extend(server.recv(1000))
        if len(received) == 5000:
            client.close()

    loop.add_reader(server.fileno(), collect)
    loop.call_later(0.3, loop.remove_reader, server.fileno())
    run_for(loop, 0.35)
    assert bytes(received) == b"q" * 5000
    assert len(closed) == 1
    server.close()


class _Host:
    """The other end of a control channel."""

    def __init__(self, loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
        self.got: list[dict[str, Any]] = []
        self.lost: list[str] = []
        self.far = pair[1]
        self.control = Control(loop, pair[0], self.got.append, self.lost.append)


def test_control_takes_messages_that_arrive_in_pieces(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    host = _Host(loop, pair)
    frame = wire.encode({"type": "poweroff", "id": 7})
    for index, byte in enumerate(frame):
        loop.call_later(0.001 * index, host.far.send, bytes([byte]))
    run_for(loop, 0.2)
    assert host.got == [{"type": "poweroff", "id": 7}]
    assert host.lost == []


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 8, b"\0\0\0\x02{}", wire.encode({"type": "signal", "id": 1})]
)
def test_control_is_lost_on_what_breaks_the_rules(
    loop: Loop, pair: tuple[socket.socket, socket.socket], garbage: bytes
) -> None:
    host = _Host(loop, pair)
    host.far.sendall(garbage)
    run_for(loop, 0.05)
    assert len(host.lost) == 1
    host.control.send(HELLO)  # harmless by now


def test_control_holds_what_a_slow_host_does_not_read_yet(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    host = _Host(loop, pair)
    for _ in range(5000):
        host.control.send(HELLO)
    decoder = wire.Decoder(wire.FROM_GUEST)
    got: list[dict[str, Any]] = []
    host.far.setblocking(False)
    loop.add_reader(host.far.fileno(), lambda: got.extend(decoder.feed(host.far.recv(1 << 16))))
    run_for(loop, 0.5)
    assert len(got) == 5000


def test_the_log_is_bounded_and_says_what_is_missing(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    read, write = os.pipe()
    log = LogStream(loop, read, near)
    total = 4 * MAX_HELD
    for _ in range(total // 4096):
        os.write(write, b"z" * 4096)
        log.drain()
    os.write(write, b"end")
    received = bytearray()
    far.setblocking(False)
    loop.add_reader(far.fileno(), lambda: received.extend(far.recv(1 << 16)))
    run_for(loop, 0.3)
    os.write(write, b"after")
    run_for(loop, 0.1)
    assert MAX_HELD <= len(received) < total
    assert b"bytes of output were dropped here]" in received
    assert received.endswith(b"after")
    os.close(write)
    run_for(loop, 0.05)  # takes note of the pipe's end


def test_the_log_is_drained_when_nobody_listens(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    far.close()
    read, write = os.pipe()
    log = LogStream(loop, read, near)
    for _ in range(100):
        os.write(write, b"z" * 4096)
        log.drain()
    os.close(write)
    run_for(loop, 0.05)


def test_sockets_are_ready_when_the_last_one_listens(loop: Loop, tmp_path: Path) -> None:
    paths = [tmp_path / "k-1", tmp_path / "k-2"]
    ready: list[float] = []
    watch = SocketWatch(loop, [str(path) for path in paths], lambda: ready.append(1))
    servers = [socket.socket(socket.AF_UNIX) for _ in paths]

    def bind(index: int) -> None:
        servers[index].bind(str(paths[index]))

    loop.call_later(0.01, bind, 0)
    loop.call_later(0.01, servers[0].listen)
    loop.call_later(0.05, bind, 1)
    run_for(loop, 0.1)
    assert not ready
    loop.call_later(0.0, servers[1].listen)  # no event tells of this
    run_for(loop, 0.1)
    assert len(ready) == 1
    watch.close()
    for server in servers:
        server.close()
