"""jupyter_kernel_test against a kernel on real Firecracker."""

from __future__ import annotations

import jupyter_kernel_test as jkt
import pytest

from tests.jupyter.test_kernel_suite import Suite
from tests.lab.inside.stack import Daemon

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def _daemon(daemon: Daemon) -> None:
    """Of the module, since a class's fixtures come after unittest's own set-up."""


class TestFirecracker(Suite, jkt.KernelTests):  # type: ignore[misc]
    kernel_name = "cantelop-python3"
    TIMEOUT = 60
