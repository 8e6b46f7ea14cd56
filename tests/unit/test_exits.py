"""What a guest reports of its kernel's end, made plausible and put into words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels import wire
from cantelop_kernels.exits import cell_id, describe
from cantelop_kernels.usage import plausible_status

MEMORY = 512 << 20
ODD = st.integers(-(1 << 70), 1 << 70)

REPORT: dict[str, Any] = {
    "type": "exited",
    "exit_code": None,
    "signal": 9,
    "oom": True,
    "memory_limit": 448 << 20,
    "memory_peak": 447 << 20,
    "cell": "ab12_3_4",
}


def test_an_honest_report() -> None:
    found = describe(wire.check(REPORT, wire.FROM_GUEST), MEMORY)
    assert "its limit of 448 MiB (peak 447 MiB)" in found.reason
    assert (found.signal, found.exit_code, found.oom, found.cell) == (9, None, True, "ab12_3_4")


FORGED = st.fixed_dictionaries(
    {
        "exit_code": st.none() | ODD,
        "signal": st.none() | ODD,
        "oom": st.booleans(),
        "memory_limit": ODD,
        "memory_peak": ODD,
        "cell": st.text(),
    }
)


@given(FORGED)
def test_a_forged_report_says_nothing_impossible(forged: dict[str, Any]) -> None:
    found = describe(REPORT | forged, MEMORY)
    assert 0 <= found.memory_limit <= MEMORY and 0 <= found.memory_peak <= MEMORY
    assert (found.exit_code is None) is (found.signal is not None)
    assert found.exit_code is None or 0 <= found.exit_code <= 255
    assert found.signal is None or 1 <= found.signal <= 64
    assert len(found.reason) < 200 and len(found.cell) <= 128
    assert found.cell.isascii() and found.cell.isprintable()


@pytest.mark.parametrize("said", ["", "a b", "a\n", "a/b", "é", "x" * 129])
def test_what_is_no_id_of_a_message(said: str) -> None:
    assert cell_id(said) == ""


@given(st.dictionaries(st.sampled_from(["memory_used", "memory_limit", "memory_current"]), ODD))
def test_no_guest_uses_more_than_it_has(forged: dict[str, Any]) -> None:
    found = plausible_status({"busy": True, **forged}, MEMORY)
    assert found.keys() == {"busy", *forged}
    assert all(0 <= found[name] <= MEMORY for name in forged)
