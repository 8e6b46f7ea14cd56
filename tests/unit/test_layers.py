"""The shape of the code, read from its import statements: the one place where it is enforced."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST = ROOT / "cantelop_kernels"
PROVISIONER = ROOT / "provisioner" / "cantelop_provisioner"
GUEST = ROOT / "guest" / "cantelop_guest"

LAYERS = [
    ["errors", "config", "wire", "slot", "schema", "relay", "pipes", "tail", "confine"],
    ["process", "host", "peers", "systemd", "trees", "trust", "watch", "download"],
    [
        *("jail", "uids", "cgroup", "netns", "firewall", "dns", "vsock", "endpoints"),
        *("image", "image_*", "record", "scratch", "workspace", "ninep", "tools"),
        *("runtime", "seccomp"),
    ],
    ["vmm", "vmm.*"],
    ["sandbox", "attendant", "caller", "channels", "logbook", "link"],
    [
        "session",
        "sessions",
        "exits",
        "plans",
        "pool",
        "reaper",
        "admission",
        "lease",
        "usage",
        "metrics",
    ],
    ["api", "daemon", "preflight", "preflight.*", "__main__", "cli", "cli.*", "bench", "bench.*"],
]
"""By layer. A module may import what is lower, and within its own layer without going in a circle.

`client` stands aside: it imports layer 0 only, and layer 6 may use it.
"""

SIDE = {"client": 0}
GUEST_LIBRARIES = {"ipykernel", "zmq", "traitlets", "IPython", "jupyter_client", "tornado", "comm"}
GUEST_SHARES = {"cantelop_kernels.wire", "cantelop_kernels.relay"}
PROVISIONER_MAY = {"client", "errors", "schema"}


def modules(folder: Path) -> dict[str, Path]:
    """Dotted names below a package, `""` for the package itself."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, package: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, wherever in it; of `from a import b`, `a.b`."""
    inside = (package.name, *path.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def of_ours(path: Path, package: Path) -> set[str]:
    """Modules of cantelop_kernels that a file imports, without the package's name."""
    known = modules(HOST)
    found = set()
    for name in imports(path, package):
        parts = name.split(".")
        if parts[0] == "cantelop_kernels":
            inner = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            found |= {next((one for one in inner if one in known), "")}
    return found - {""}


def layer(module: str) -> int:
    for number, names in enumerate(LAYERS):
        for name in names:
            if module == name or (name[-1] == "*" and module.startswith(name[:-1])):
                return number
    raise AssertionError(f"{module} stands in no layer: put it into tests/unit/test_layers.py")


def test_imports_go_to_lower_layers_only() -> None:
    wrong = []
    for module, path in modules(HOST).items():
        if not module:
            continue
        own = SIDE.get(module) if module in SIDE else layer(module)
        assert own is not None
        for used in of_ours(path, HOST) - {module}:
            allowed = 6 if used in SIDE else layer(used)
            if allowed > own:
                wrong.append(f"{module} imports {used}")
    assert not wrong


def test_no_circles() -> None:
    graph = {name: of_ours(path, HOST) for name, path in modules(HOST).items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join((*way, module))}"
        if module not in done:
            for used in graph[module] - {module}:
                visit(used, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_one_module_starts_processes() -> None:
    users = {
        name
        for folder in (HOST, PROVISIONER)
        for name, path in modules(folder).items()
        if any(one.split(".")[0] == "subprocess" for one in imports(path, folder))
    }
    assert users == {"process"}


def test_the_provisioner_stands_on_the_client_alone() -> None:
    used = set()
    for path in modules(PROVISIONER).values():
        used |= of_ours(path, PROVISIONER)
    assert used <= PROVISIONER_MAY


def test_the_guest_needs_the_standard_library_and_the_kernel_only() -> None:
    wrong = []
    for name, path in modules(GUEST).items():
        for used in imports(path, GUEST):
            first = used.split(".")[0]
            shared = any(used == one or used.startswith(f"{one}.") for one in GUEST_SHARES)
            standard = first in sys.stdlib_module_names or first == "cantelop_guest"
            if not (shared or standard or first in GUEST_LIBRARIES):
                wrong.append(f"{name} imports {used}")
    assert not wrong


@pytest.mark.parametrize("name", ["wire", "relay", ""])
def test_what_the_guest_shares_needs_the_standard_library_only(name: str) -> None:
    found = {one.split(".")[0] for one in imports(modules(HOST)[name], HOST)}
    assert found <= set(sys.stdlib_module_names)


def test_the_agent_does_without_asyncio() -> None:
    """Its import alone costs the emulated guest a good part of a second of every boot."""
    users = {
        name
        for name, path in modules(GUEST).items()
        if any(one.split(".")[0] == "asyncio" for one in imports(path, GUEST))
    }
    assert not users
