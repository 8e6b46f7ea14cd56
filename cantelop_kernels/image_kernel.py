"""The guest's kernel: Debian's own package, unpacked into what a microVM boots from.

Layer 2, used by the image builder. Makes `vmlinux` (the ELF that PVH and Firecracker boot),
`vmlinuz`, `busybox`, the modules under `mod/`, uncompressed, and `kernel.json`.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import ImageError
from .image_apt import Mirror, PrivateApt, unpack
from .image_recipe import Recipe
from .process import run

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SIGNED = b"~Module signature appended~\n"
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


async def build_kernel(
    recipe: Recipe, mirror: Mirror, work: Path, into: Path, on_line: Callable[[str], None]
) -> None:
    """Fetch and unpack the kernel and busybox; `work` is for what is not kept."""
    apt = PrivateApt(work / "apt", mirror.sources(recipe.suite), on_line)
    await apt.update()
    package = await apt.depends(recipe.kernel, r"linux-image-\d.*")
    tree = work / "tree"
    tree.mkdir()
    kernel = await unpack(await apt.fetch(package, work), tree)
    busybox = await unpack(await apt.fetch(recipe.busybox, work), tree)
    release = package.removeprefix("linux-image-")
    vmlinuz = tree / "boot" / f"vmlinuz-{release}"
    shutil.copyfile(vmlinuz, into / "vmlinuz")
    shutil.copyfile(tree / "usr" / "bin" / "busybox", into / "busybox")
    await _vmlinux(vmlinuz, work, into / "vmlinux")
    modules = await _modules(recipe, tree, release, into / "mod")
    licences = {name["name"]: name["version"] for name in (kernel, busybox)}
    facts = {"release": release, "packages": licences, **modules}
    (into / "kernel.json").write_text(json.dumps(facts, indent=1))


def zstd_payload(image: bytes) -> bytes:
    """The compressed kernel inside a bzImage, by its header (Linux x86 boot protocol, 2.08).

    Four bytes follow the payload within its length: the uncompressed size.
    """
    if image[0x202:0x206] != b"HdrS":
        raise ImageError("the kernel package holds no bzImage")
    setup_sectors = image[0x1F1] or 4
    offset = int.from_bytes(image[0x248:0x24C], "little") + (setup_sectors + 1) * 512
    length = int.from_bytes(image[0x24C:0x250], "little")
    payload = image[offset : offset + length - 4]
    if not payload.startswith(_ZSTD_MAGIC):
        raise ImageError("the kernel is not compressed with zstd, as Debian's has been since 12")
    return payload


async def _vmlinux(vmlinuz: Path, work: Path, into: Path) -> None:
    payload = work / "vmlinux.zst"
    payload.write_bytes(zstd_payload(vmlinuz.read_bytes()))
    await run(["zstd", "-q", "-d", str(payload), "-o", str(into)], env=_ENV, deadline=120)
    with into.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            raise ImageError("what the kernel unpacks to is no ELF file")


async def _modules(recipe: Recipe, tree: Path, release: str, into: Path) -> dict[str, Any]:
    """Copy the wanted modules; the two lists of file names in the order to load them."""
    (tree / "lib").symlink_to("usr/lib")  # depmod looks in /lib/modules
    await run(["depmod", "-b", str(tree), release], env=_ENV, deadline=120)
    base = tree / "usr" / "lib" / "modules" / release
    builtin = {module_name(line) for line in (base / "modules.builtin").read_text().split()}
    deps = parse_deps((base / "modules.dep").read_text())
    boot = load_order(deps, recipe.boot_modules, builtin)
    extra = [path for path in load_order(deps, recipe.extra_modules, builtin) if path not in boot]
    into.mkdir()
    await asyncio.to_thread(_uncompress, base, [*boot, *extra], into)
    return {"boot": [file_name(path) for path in boot], "extra": [file_name(p) for p in extra]}


def _uncompress(base: Path, paths: Iterable[str], into: Path) -> None:
    for path in paths:
        data = (base / path).read_bytes()
        content = lzma.decompress(data) if path.endswith(".xz") else data
        (into / file_name(path)).write_bytes(lighten(content))


def lighten(module: bytes) -> bytes:
    """A module without its signature and its type information: an emulated guest loads it in half
    the time (0.2 s less for all).

    The kernel hashes a signed module whole, though it has no key to compare with: what is in an
    image is vouched for by the image's digest. It reads types only from a section named `.BTF`.
    Format: struct module_signature and kernel/module/signing.c, Linux 6.12.
    """
    if module.endswith(_SIGNED):
        end = len(module) - len(_SIGNED) - 12
        module = module[: end - int.from_bytes(module[end + 8 : end + 12], "big")]
    return module.replace(b"\0.BTF\0", b"\0.btf\0")


def module_name(path: str) -> str:
    """The name `modprobe` knows a module file by."""
    return file_name(path).removesuffix(".ko").replace("-", "_")


def file_name(path: str) -> str:
    """The file name of a module once it is uncompressed."""
    return Path(path).name.removesuffix(".xz")


def parse_deps(text: str) -> dict[str, list[str]]:
    """What each module needs, both as paths: the content of `modules.dep`."""
    lines = (line.partition(":") for line in text.splitlines() if line.strip())
    return {path: needs.split() for path, _, needs in lines}


def load_order(
    deps: Mapping[str, list[str]], wanted: Iterable[str], builtin: Iterable[str] = ()
) -> list[str]:
    """The wanted modules' paths, each after all it needs. Names built into the kernel are left out.

    `modules.dep` lists needs with the ones to load first at the end. Raises ImageError for a name
    that the kernel does not have.
    """
    paths = {module_name(path): path for path in deps}
    order: list[str] = []
    for name in wanted:
        if name in paths:
            path = paths[name]
            order += [p for p in [*reversed(deps[path]), path] if p not in order]
        elif name not in set(builtin):
            raise ImageError(f"the kernel has no module {name!r}")
    return order
