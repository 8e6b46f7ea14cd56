"""jupyter_kernel_test against a microVM, and against a plain local kernel beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import jupyter_kernel_test as jkt
import pytest
from ipykernel.kernelspec import write_kernel_spec

from tests.jupyter.conftest import Stack

pytestmark = pytest.mark.vm


class Suite:
    """The samples of jupyter_kernel_test's own test of ipykernel."""

    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar[list[dict[str, Any]]] = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples: ClassVar[list[str]] = [
        "1",
        "print('hello, world')",
        "def f(x):\n  return x*2\n\n\n",
    ]
    incomplete_code_samples: ClassVar[list[str]] = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples: ClassVar[list[str]] = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result: ClassVar[list[dict[str, str]]] = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data: ClassVar[list[dict[str, str]]] = [
        {
            "code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))",
            "mime": "text/html",
        },
        {
            "code": "from IPython.display import Math, display; display(Math('\\\\frac{1}{2}'))",
            "mime": "text/latex",
        },
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


@pytest.fixture(scope="module", autouse=True)
def _kernelspecs(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the module, since a class's fixtures come after unittest's own set-up."""
    folder = tmp_path_factory.mktemp("local")
    write_kernel_spec(folder / "kernels" / TestLocal.kernel_name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder), prepend=os.pathsep)
        yield


class TestLocal(Suite, jkt.KernelTests):  # type: ignore[misc]
    """What the suite says here of a plain ipykernel: the measure for the other one."""

    kernel_name = "local-python3"


class TestMicroVM(Suite, jkt.KernelTests):  # type: ignore[misc]
    kernel_name = "cantelop-python3"
