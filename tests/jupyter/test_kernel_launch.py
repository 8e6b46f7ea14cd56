"""Kernels with a command and an environment of their own, and launches that fail."""

from __future__ import annotations

import pytest
from jupyter_client.manager import KernelManager

from cantelop_kernels import errors
from tests.fakes.blocking import run
from tests.jupyter.conftest import Stack, running

pytestmark = pytest.mark.vm


def test_own_command_and_environment(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with running("cantelop-own") as (_, client):
        assert run(client, "import sys; print(sys.flags.dev_mode)") == "True"
        seen = run(client, "import os; print(sorted(os.environ.items()))")
    assert "('FROM_SPEC', 'a value')" in seen
    assert "('TZ', 'Asia/Tokyo')" in seen
    for absent in ("A_SECRET", "NOT_ALLOWED", "JPY_PARENT_PID"):
        assert absent not in seen


def test_a_kernel_that_ends_at_once_is_a_failed_launch(stack: Stack) -> None:
    manager = KernelManager(kernel_name="cantelop-brief")
    with pytest.raises(errors.LaunchError, match="status 3"):
        manager.start_kernel()
    assert not manager.has_kernel
    assert stack.live() == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"app": "nothing"}, "no App named 'nothing'"),
        ({"image": "nothing"}, "cantelop image build"),
        ({"memory_mib": 1 << 20}, "memory_mib must be between"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_starts(
    stack: Stack, config: dict[str, object], text: str
) -> None:
    manager = KernelManager(kernel_name="cantelop-python3")
    assert manager.kernel_spec is not None
    manager.kernel_spec.metadata["kernel_provisioner"]["config"] = config
    with pytest.raises(errors.CantelopError, match=text):
        manager.start_kernel()
    assert stack.live() == []
