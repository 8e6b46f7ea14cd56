"""`cantelop kernelspec`: makes microVM kernels appear in Jupyter's menus, lists and removes them.

A kernelspec is a folder with a `kernel.json` and logos. Ours name the provisioner "cantelop"; no
other kernelspec is ever replaced or removed from here.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jupyter_core.paths import SYSTEM_JUPYTER_PATH, jupyter_data_dir, jupyter_path

from cantelop_kernels.cli import terminal
from cantelop_kernels.errors import BadRequest, CantelopError, NotFound, PermissionRefused
from cantelop_kernels.schema import SessionRequest

PROVISIONER = "cantelop"
DEFAULT_NAME = "cantelop-python3"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Installed:
    """One kernelspec of ours that Jupyter can find."""

    name: str
    display_name: str
    path: str
    config: dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Called by the command line's composition root."""
    parser = subparsers.add_parser("kernelspec", help="make microVM kernels known to Jupyter")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="install|ls|remove")
    _add_install(verbs.add_parser("install", help="install (or replace) a kernelspec"))
    listing = verbs.add_parser("ls", help="list the kernelspecs that start microVMs")
    listing.add_argument("--json", action="store_true", help="for programs")
    listing.set_defaults(func=ls)
    removal = verbs.add_parser("remove", help="remove a kernelspec that starts microVMs")
    removal.add_argument("name", metavar="NAME")
    removal.set_defaults(func=remove)


def _add_install(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--user", action="store_true", help="for this user (outside a venv: default)"
    )
    where.add_argument("--prefix", metavar="P", help="in P/share/jupyter")
    where.add_argument("--sys-prefix", action="store_true", help="in this venv (there: default)")
    where.add_argument("--system", action="store_true", help="for every user of this machine")
    parser.add_argument("--name", metavar="N", default=DEFAULT_NAME, help="default: %(default)s")
    parser.add_argument("--display-name", metavar="D", help="what menus show")
    parser.add_argument("--app", metavar="A", default="default", help="App whose policy applies")
    parser.add_argument("--image", metavar="I", help="image, if not the App's")
    parser.add_argument("--vcpus", metavar="N", type=int, help="virtual CPUs, if not the App's")
    parser.add_argument("--memory-mib", metavar="M", type=int, help="MiB, if not the App's")
    parser.add_argument(
        "--env",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="variables to pass, if the App may",
    )
    parser.add_argument(
        "--allow-emulation",
        action="store_true",
        help="run without hardware virtualization, which is no security boundary",
    )
    parser.set_defaults(func=install)


async def install(args: argparse.Namespace) -> int:
    """Write the kernelspec in one step, replacing one of ours; another's is left alone."""
    name = args.name.lower()
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"not a name for a kernelspec: {args.name!r}",
            hint="use letters, digits, '.', '_' and '-'",
        )
    spec = kernel_json(_template(), name, args)
    folder = _kernels_folder(args)
    try:
        _publish(folder, name, spec)
    except PermissionError as error:
        raise PermissionRefused(
            f"no permission to write to {folder}", hint="use --user, or become root"
        ) from error
    except OSError as error:
        raise CantelopError(
            f"cannot write to {folder}: {error.strerror}", hint="choose another with --prefix"
        ) from error
    print(f"installed {name} in {folder / name}")
    if str(folder.parent) not in jupyter_path():
        print(f"note: Jupyter looks there only with JUPYTER_PATH={folder.parent}", file=sys.stderr)
    return 0


async def ls(args: argparse.Namespace) -> int:
    found = list(installed())
    if args.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    if not found:
        print("no kernelspec starts microVMs yet: cantelop kernelspec install", file=sys.stderr)
        return 0
    headers = ["NAME", "DISPLAY NAME", "APP", "IMAGE", "VCPUS", "MEMORY", "PATH"]
    print(terminal.table(headers, [_row(one) for one in found]))
    return 0


def _row(one: Installed) -> list[str]:
    keys = ("app", "image", "vcpus", "memory_mib")
    settings = [str(one.config.get(key) or "-") for key in keys]
    cells = [one.name, one.display_name, *settings, one.path]
    return [terminal.harmless(cell, colours=False) for cell in cells]


async def remove(args: argparse.Namespace) -> int:
    path = _find(args.name.lower())
    _refuse_others(path)
    try:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:
        raise PermissionRefused(
            f"cannot remove {path}: {error.strerror}", hint="become the user who installed it"
        ) from error
    print(f"removed {args.name} from {path.parent}")
    return 0


def kernel_json(template: dict[str, Any], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The kernelspec as asked for. Raises BadRequest for what no daemon would take."""
    config: dict[str, Any] = {"app": args.app}
    for key in ("image", "vcpus", "memory_mib", "env", "allow_emulation"):
        if getattr(args, key):
            config[key] = getattr(args, key)
    if any(number is not None and number < 1 for number in (args.vcpus, args.memory_mib)):
        raise BadRequest("--vcpus and --memory-mib must be at least 1", hint="leave it to the App")
    SessionRequest(key="", app=args.app, image=args.image, env=dict.fromkeys(args.env, "")).check()
    shown = template["display_name"]
    if name != DEFAULT_NAME:
        shown = f"{shown.rstrip(')')}: {name})"
    stanza = {"provisioner_name": PROVISIONER, "config": config}
    metadata = template["metadata"] | {"kernel_provisioner": stanza}
    return template | {"display_name": args.display_name or shown, "metadata": metadata}


def installed() -> Iterator[Installed]:
    """Ours among all that Jupyter can find, the first of each name, as Jupyter does."""
    for name, path in _kernelspecs().items():
        spec = _read(path)
        if spec is not None and _is_ours(spec):
            config = spec["metadata"]["kernel_provisioner"].get("config") or {}
            yield Installed(name, str(spec.get("display_name", name)), str(path), config)


def _kernelspecs() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in jupyter_path("kernels"):
        for file in sorted(Path(folder).glob("*/kernel.json")):
            found.setdefault(file.parent.name.lower(), file.parent)
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        spec = json.loads((path / "kernel.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return spec if isinstance(spec, dict) else None


def _is_ours(spec: dict[str, Any]) -> bool:
    metadata = spec.get("metadata")
    stanza = metadata.get("kernel_provisioner") if isinstance(metadata, dict) else None
    return isinstance(stanza, dict) and stanza.get("provisioner_name") == PROVISIONER


def _refuse_others(path: Path) -> None:
    spec = _read(path)
    if spec is None or not _is_ours(spec):
        raise PermissionRefused(
            f"{path} is not a kernelspec of Cantelop's: left as it is",
            hint="choose another --name, or use: jupyter kernelspec remove",
        )


def _find(name: str) -> Path:
    found = _kernelspecs()
    if name not in found:
        raise NotFound(f"no kernelspec named {name!r}", hint="see: cantelop kernelspec ls")
    return found[name]


def _kernels_folder(args: argparse.Namespace) -> Path:
    in_venv = sys.prefix != sys.base_prefix
    if args.prefix:
        base = Path(args.prefix).expanduser().absolute() / "share" / "jupyter"
    elif args.system:
        base = Path(SYSTEM_JUPYTER_PATH[0])
    elif args.sys_prefix or (in_venv and not args.user):
        base = Path(sys.prefix) / "share" / "jupyter"
    else:
        base = Path(jupyter_data_dir())
    return base / "kernels"


def _source() -> Path:
    """Our own kernelspec's folder: in the work tree, or where the wheel's data was installed."""
    inside = Path("share") / "jupyter" / "kernels" / DEFAULT_NAME
    tree = Path(__file__).resolve().parents[2]
    for base in (tree, Path(sys.prefix)):
        if (base / inside / "logo-svg.svg").is_file():
            return base / inside
    raise CantelopError(
        "the kernelspec that comes with this package is missing",
        hint="install it again: pip install --force-reinstall cantelop-kernels",
    )


def _template() -> dict[str, Any]:
    spec = _read(_source())
    if spec is None:
        raise CantelopError(f"{_source()}/kernel.json is damaged", hint="install the package again")
    return spec


def _publish(folder: Path, name: str, spec: dict[str, Any]) -> None:
    """Whole or not at all: made in a folder beside it, then renamed."""
    target = folder / name
    if target.exists() or target.is_symlink():
        _refuse_others(target)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cantelop-", dir=folder) as scratch:
        staged = Path(scratch) / "new"
        staged.mkdir(mode=0o755)
        for logo in _source().glob("logo-*"):
            shutil.copyfile(logo, staged / logo.name)
        text = json.dumps(spec, indent=2, ensure_ascii=False) + "\n"
        (staged / "kernel.json").write_text(text, encoding="utf-8")
        if target.exists() or target.is_symlink():
            target.replace(Path(scratch) / "old")
        staged.replace(target)
