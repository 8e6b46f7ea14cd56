"""Shared by the builder's tests: states whose slow parts come from the one real build.

The default image is built once, in `$CANTELOP_TEST_STATE` (default: `.cache/state` of the source
tree), where it stays for the next run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cantelop_kernels.image_cache import Cache
from cantelop_kernels.image_recipe import recipe_folders

RECIPE = "mine"


def default_state() -> Path:
    folder = Path(__file__).parents[2] / ".cache" / "state"
    return Path(os.environ.get("CANTELOP_TEST_STATE") or folder)


@dataclass
class Recorder:
    """A Progress that remembers."""

    steps: list[tuple[str, bool]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    on_line: Callable[[str], None] = lambda _: None
    on_start: Callable[[str], None] = lambda _: None

    def started(self, step: str) -> None:
        self.on_start(step)

    def finished(self, step: str, *, cached: bool) -> None:
        self.steps.append((step, cached))

    def line(self, text: str) -> None:
        self.lines.append(text)
        self.on_line(text)


def copy_recipe(folder: Path) -> list[Path]:
    """The default recipe under another name."""
    source = next(p for p in recipe_folders() if p.is_dir()) / "python3"
    shutil.copytree(source, folder / RECIPE)
    return [folder]


def lend(state: Path, *parts: str, copy: bool = False) -> None:
    """Put the default image's cache entries into another state, by hard links where it can."""
    cache = state / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (entry,) = (default_state() / "cache").glob(f"{part}-python3-*")
        target = cache / entry.name.replace("-python3-", f"-{RECIPE}-")
        shutil.copytree(entry, target, copy_function=shutil.copy2 if copy else link)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def borrowed_kernel() -> Callable[..., Awaitable[None]]:
    """In place of `build_kernel`: the one that is in the default image's cache, without a fetch."""
    (entry,) = (default_state() / "cache").glob("kernel-python3-*")

    async def build(_recipe: object, _mirror: object, _work: Path, into: Path, _: object) -> None:
        shutil.copytree(entry, into, dirs_exist_ok=True)
        (into / "entry.json").unlink()

    return build


def left_over(state: Path) -> set[str]:
    """What there is below a state besides whole cache entries, locks and the store's folders."""
    cache = Cache(state / "cache", RECIPE)
    found = {path.name for path in (state / "cache").iterdir() if path.suffix != ".lock"}
    for part in ("kernel", "root"):
        for entry in (state / "cache").glob(f"{part}-{RECIPE}-*"):
            if cache.get(part, entry.name.rpartition("-")[2]):
                found.remove(entry.name)
    return found | {path.name for path in (state / "images").glob("*/*")}


def mounts_below(folder: Path) -> list[str]:
    return [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line
    ]


def processes_of(marker: str) -> list[psutil.Process]:
    """Processes with that string among their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and marker in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
