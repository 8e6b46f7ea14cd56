"""What crosses the daemon's socket: strict, and the same after a round trip."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cantelop_kernels.errors import BadRequest, CantelopError, LaunchError, from_json
from cantelop_kernels.schema import MAX_ENV, Endpoints, Exit, SessionRequest, SessionView

VIEW = SessionView(
    id="s-1",
    app="default",
    user=0,
    image="python3",
    digest="d",
    vcpus=1,
    memory_mib=512,
    state="exited",
    step="",
    created=1.0,
    boot_seconds=2.0,
    endpoints=Endpoints("t", "/run/x/k"),
    vmm="qemu",
    emulated=True,
    notices=["n"],
    exit=Exit(reason="r", signal=9),
)


def test_a_view_survives_the_round_trip() -> None:
    assert SessionView.from_json(VIEW.to_json()) == VIEW


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"key": 1},
        {"key": "k", "vcpus": "2"},
        {"key": "k", "vcpus": True},
        {"key": "k", "argv": [1]},
        {"key": "k", "argv": []},
        {"key": "k", "env": {"A": 1}},
        {"key": "k", "env": {"A=B": "1"}},
        {"key": "k", "env": {"A": "\0"}},
        {"key": "k", "env": {"A": "x" * (MAX_ENV + 1)}},
        {"key": "k", "app": "../x"},
        {"key": "k", "image": "/etc/passwd"},
        {"key": "k" * 513},
        # THREATS.md 38: privileged things have no field at all
        {"key": "k", "vmm_args": ["-drive"]},
        {"key": "k", "kernel_args": "init=/bin/sh"},
        {"key": "k", "root": "/"},
        {"key": "k", "uid": 0},
    ],
)
def test_bad_requests_are_refused(body: Any) -> None:
    with pytest.raises(BadRequest):
        SessionRequest.from_json(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(["key", "app", "argv", "env", "cwd", "x"]), json_values))
def test_any_json_is_a_request_or_a_bad_request(body: dict[str, Any]) -> None:
    try:
        request = SessionRequest.from_json(body)
    except BadRequest:
        return
    assert SessionRequest.from_json(request.to_json()) == request


def test_an_error_crosses_as_the_same_class() -> None:
    error = LaunchError("no", hint="do", step="disk", console="c")
    back = from_json(error.to_json())
    assert type(back) is LaunchError
    assert (back.message, back.hint, back.details) == ("no", "do", {"step": "disk", "console": "c"})
    assert str(back) == "no (do)"
    assert type(from_json({"code": "from the future"})) is CantelopError
