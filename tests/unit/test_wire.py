"""The guest's control channel: nothing but the schema gets through, however the bytes are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels import wire

HELLO = {
    "type": "hello",
    "version": 2,
    "boot_id": "b",
    "release": "6.12",
    "memory": 512 << 20,
    "vcpus": 1,
}


@given(st.lists(st.integers(1, 40)), st.integers(1, 4))
def test_frames_survive_any_cut(cuts: list[int], count: int) -> None:
    stream = wire.encode(HELLO) * count
    decoder = wire.Decoder(wire.FROM_GUEST)
    seen = []
    for cut in [*cuts, len(stream)]:
        part, stream = stream[:cut], stream[cut:]
        seen += list(decoder.feed(part))
    assert seen == [HELLO] * count


@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_nothing(data: bytes) -> None:
    try:
        for message in wire.Decoder(wire.FROM_GUEST).feed(data):
            wire.check(message, wire.FROM_GUEST)
    except wire.WireError:
        pass


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"version": "1"},
        {"version": True},
        {"memory": 1.5},
        {"type": "unknown"},
        {"type": ["hello"]},
    ],
)
def test_what_is_not_in_the_schema_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(wire.WireError):
        wire.check(HELLO | change, wire.FROM_GUEST)


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(wire.WireError, match="fields"):
        wire.check({"type": "hello", "version": 1}, wire.FROM_GUEST)


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    header = (wire.MAX_FRAME + 1).to_bytes(4, "big")
    with pytest.raises(wire.WireError, match="over the limit"):
        list(wire.Decoder(wire.FROM_GUEST).feed(header))
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.encode({"type": "failed", "id": 1, "reason": "x" * wire.MAX_FRAME})


def test_deep_json_is_an_error() -> None:
    body = b"[" * 30_000
    with pytest.raises(wire.WireError):
        list(wire.Decoder(wire.FROM_GUEST).feed(len(body).to_bytes(4, "big") + body))


def test_a_frame_is_a_length_and_json() -> None:
    frame = wire.encode(HELLO)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert json.loads(frame[4:]) == HELLO


STATUS = {
    "type": "status",
    "id": 1,
    "state": "running",
    "memory_limit": 3,
    "memory_current": 1,
    "memory_peak": 2,
    "memory_used": 4,
    "cpu_seconds": 0.5,
    "busy": None,
    "cell": "",
    "idle_seconds": 1,
    "uptime": 2.5,
}


@pytest.mark.parametrize("busy", [True, False, None])
def test_whether_a_kernel_is_busy_may_be_unknown(busy: bool | None) -> None:
    message = STATUS | {"busy": busy}
    assert wire.check(message, wire.FROM_GUEST) == message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e300", "true", "null"])
def test_a_number_is_finite(number: str) -> None:
    body = json.dumps(STATUS).replace('"idle_seconds": 1', f'"idle_seconds": {number}').encode()
    with pytest.raises(wire.WireError, match="idle_seconds"):
        list(wire.Decoder(wire.FROM_GUEST).feed(len(body).to_bytes(4, "big") + body))


def test_a_kernel_is_bound_not_started() -> None:
    wire.check({"type": "warm_up", "id": 1}, wire.TO_GUEST)
    wire.check({"type": "warm", "memory_used": 1}, wire.FROM_GUEST)
    with pytest.raises(wire.WireError, match="unknown"):
        wire.check({"type": "start", "id": 1}, wire.TO_GUEST)
