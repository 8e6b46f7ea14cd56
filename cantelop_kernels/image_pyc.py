"""Byte code for the guest's Python, made on the host, for files that are not part of the root.

Layer 2, used by the image builder. The agent travels in the initramfs, so that a change of it does
not rebuild the root; without byte code its import would cost a quarter of a second of every boot
under emulation. Byte code is made by the same Python that reads it, and this host has another one:
so a copy of the guest's bare interpreter (12 MB, with its own libc) is kept beside the root.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import ImageError
from .process import run

LOADER = "ld-linux-x86-64.so.2"
_LIBRARIES = (LOADER, "libc.so.6", "libm.so.6", "libz.so.1", "libexpat.so.1")

_SCRIPT = """\
import _frozen_importlib_external as external, _imp, sys
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    with open(source, "rb") as stream:
        text = stream.read()
    code = compile(text, source, "exec", dont_inherit=True, optimize=0)
    key = _imp.source_hash(external._RAW_MAGIC_NUMBER, text)
    with open(target, "wb") as stream:
        stream.write(external._code_to_hash_pyc(code, key, checked=False))
"""
"""Needs no module that is not built in: of the library, the interpreter's copy has `encodings`."""


def copy_interpreter(root: Path, version: str, into: Path) -> None:
    """Take the bare interpreter out of a root of Debian 13."""
    (into / "lib" / f"python{version}").mkdir(parents=True)
    for name in _LIBRARIES:
        shutil.copyfile(root / "usr/lib/x86_64-linux-gnu" / name, into / name)
    shutil.copyfile(root / f"usr/bin/python{version}", into / "python")
    for name in (LOADER, "python"):
        (into / name).chmod(0o755)
    encodings = Path("lib") / f"python{version}" / "encodings"
    shutil.copytree(
        root / "usr" / encodings, into / encodings, ignore=shutil.ignore_patterns("__pycache__")
    )


def pyc_path(source: Path, version: str) -> Path:
    """Where Python of that version looks for a module's byte code."""
    tag = f"cpython-{version.replace('.', '')}"
    return source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc"


async def compile_tree(interpreter: Path, version: str, tree: Path, work: Path) -> None:
    """Byte code, used without a look at its source, for every module below `tree`.

    `interpreter` is a copy made by `copy_interpreter`; `work` takes what is not kept. Raises
    ImageError on a syntax error.
    """
    sources = sorted(path.relative_to(tree) for path in tree.rglob("*.py"))
    pairs = [(source, pyc_path(source, version)) for source in sources]
    for _, target in pairs:
        (tree / target.parent).mkdir(exist_ok=True)
    script = work / "compile.py"
    script.write_text(_SCRIPT)
    loader = [str(interpreter / LOADER), "--library-path", str(interpreter)]
    names = [str(path) for pair in pairs for path in pair]
    argv = [*loader, str(interpreter / "python"), "-B", "-S", "-s", "-P", str(script), *names]
    done = await run(
        argv, env={"PYTHONHOME": str(interpreter)}, cwd=tree, deadline=120, check=False
    )
    if done.returncode != 0:
        last = done.stderr_tail.strip().rpartition("\n")[2]
        raise ImageError(f"the guest's agent does not compile: {last}")
