"""The real builder: the default image; builds that wait, fail, are killed or fill the disk."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from cantelop_kernels import image_build, image_root
from cantelop_kernels.errors import ImageError
from cantelop_kernels.image import Image, ImageStore
from cantelop_kernels.image_build import build
from cantelop_kernels.image_lock import locked
from cantelop_kernels.image_pyc import compile_tree, pyc_path
from cantelop_kernels.process import run
from tests.host import image_builds as builds
from tests.host.image_builds import RECIPE, Recorder

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="building an image needs root"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def default_image() -> Image:
    return asyncio.run(build(builds.default_state()))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for states and recipes; at the end no process, mount or half entry is left in it."""
    yield tmp_path
    assert builds.mounts_below(tmp_path) == []
    assert builds.processes_of(str(tmp_path)) == []


@pytest.fixture
def folders(place: Path) -> list[Path]:
    (place / "recipes").mkdir()
    return builds.copy_recipe(place / "recipes")


@pytest.fixture
def state(place: Path, default_image: Image) -> Path:
    """A state where kernel and root are cached already, and nothing is published."""
    builds.lend(place / "state", "kernel", "root")
    return place / "state"


@pytest.fixture
def rootless(place: Path, default_image: Image) -> Path:
    """A state where only the kernel is cached."""
    builds.lend(place / "state", "kernel")
    return place / "state"


async def test_the_default_image_is_whole(default_image: Image) -> None:
    ImageStore(builds.default_state()).resolve("python3", verify=True)
    assert default_image.vmlinux.read_bytes()[:4] == b"\x7fELF"
    assert default_image.root.stat().st_uid == 0
    packages = default_image.manifest["packages"]
    python = {entry["name"].lower(): entry for entry in packages["python"]}
    wanted = {"ipykernel", "ipywidgets", "numpy", "pandas", "matplotlib", "requests"}
    assert wanted <= python.keys()
    assert python["ipykernel"]["licences"] == ["BSD-3-Clause"]
    debian = {entry["name"]: entry for entry in packages["debian"]}
    assert {"python3-pip", "git", "sudo"} <= debian.keys()
    assert "GPL-2" in debian["git"]["licences"]


async def test_the_root_has_what_a_first_use_needs(default_image: Image) -> None:
    for path in (
        "/home/sandbox/.cache/matplotlib",
        "/etc/sudoers.d/sandbox",
        "/usr/local/lib/python3.13/dist-packages/pandas/__pycache__/__init__.cpython-313.pyc",
        "/usr/share/doc/bash/copyright",
    ):
        await run(["dump.erofs", f"--path={path}", str(default_image.root)], deadline=60)


async def test_the_agent_is_compiled_for_the_guests_python(
    default_image: Image, place: Path
) -> None:
    (interpreter,) = (builds.default_state() / "cache").glob("root-python3-*/interpreter")
    (place / "tree").mkdir()
    (place / "tree" / "good.py").write_text("x = 1\n")
    await compile_tree(interpreter, "3.13", place / "tree", place)
    code = pyc_path(place / "tree" / "good.py", "3.13").read_bytes()
    assert code[4:8] == b"\1\0\0\0"  # PEP 552: by hash, and never checked
    (place / "tree" / "bad.py").write_text("x = (\n")
    with pytest.raises(ImageError, match="does not compile: SyntaxError"):
        await compile_tree(interpreter, "3.13", place / "tree", place)
    assert list(interpreter.rglob("__pycache__")) == []


async def test_a_second_build_finds_everything_done(default_image: Image) -> None:
    progress = Recorder()
    assert await build(builds.default_state(), progress=progress) == default_image
    assert ("kernel", True) in progress.steps and ("root", True) in progress.steps


async def test_equal_parts_give_an_equal_image(
    default_image: Image, state: Path, folders: list[Path]
) -> None:
    image = await build(state, RECIPE, folders=folders)
    assert image.digest == default_image.digest
    assert ImageStore(state).resolve(RECIPE, verify=True) == image
    assert (image.root.stat().st_nlink > 1) == (image.root.stat().st_dev == _device(default_image))


def _device(image: Image) -> int:
    return image.root.stat().st_dev


async def test_a_build_waits_for_another(state: Path, folders: list[Path]) -> None:
    waiting = asyncio.Event()
    progress = Recorder(on_line=lambda _: waiting.set())
    async with locked(state / "cache" / f"{RECIPE}.lock", lambda: None):
        task = asyncio.create_task(build(state, RECIPE, progress=progress, folders=folders))
        await asyncio.wait_for(waiting.wait(), 10)
        assert progress.lines == ["another build of this image is running; waiting for it"]
        assert progress.steps == []
    await asyncio.wait_for(task, 60)


async def test_a_wait_for_another_can_be_cancelled(state: Path, folders: list[Path]) -> None:
    waiting = asyncio.Event()
    progress = Recorder(on_line=lambda _: waiting.set())
    async with locked(state / "cache" / f"{RECIPE}.lock", lambda: None):
        task = asyncio.create_task(build(state, RECIPE, progress=progress, folders=folders))
        await asyncio.wait_for(waiting.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_builds_at_once_give_one_image(state: Path, folders: list[Path]) -> None:
    images = await asyncio.gather(*(build(state, RECIPE, folders=folders) for _ in range(4)))
    assert len({image.digest for image in images}) == 1
    assert len(list((state / "images" / "store").iterdir())) == 1
    ImageStore(state).resolve(RECIPE, verify=True)


async def test_a_broken_cache_is_built_again(
    place: Path, folders: list[Path], default_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = place / "state"
    builds.lend(state, "kernel", copy=True)
    builds.lend(state, "root")
    (vmlinux,) = state.glob("cache/kernel-*/vmlinux")
    os.truncate(vmlinux, 1000)
    monkeypatch.setattr(image_build, "build_kernel", builds.borrowed_kernel())
    progress = Recorder()
    image = await build(state, RECIPE, progress=progress, folders=folders)
    assert ("kernel", False) in progress.steps
    assert image.digest == default_image.digest


async def test_a_corrupt_image_is_repaired(state: Path, folders: list[Path]) -> None:
    image = await build(state, RECIPE, folders=folders)
    image.initramfs.write_bytes(b"garbage")
    with pytest.raises(ImageError, match="corrupt"):
        ImageStore(state).resolve(RECIPE)
    assert await build(state, RECIPE, folders=folders) == image
    ImageStore(state).resolve(RECIPE, verify=True)


STEPS = {
    "debian": "root: Debian packages",
    "python": "root: Python packages",
    "settle": "root: user and byte code",
    "pack": "root: file system",
}


@pytest.fixture
def hollow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root builder whose steps do nothing, so that a single one can be made to fail."""

    async def nothing(*_: object) -> None: ...

    for name in (*STEPS, "compile"):
        monkeypatch.setattr(image_root.RootBuilder, name, nothing)
    monkeypatch.setattr(image_build, "copy_interpreter", lambda *_: None)


@pytest.mark.usefixtures("hollow")
@pytest.mark.parametrize(("method", "step"), STEPS.items())
async def test_a_step_that_fails_is_named_and_leaves_nothing(
    method: str, step: str, rootless: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: image_root.RootBuilder, *_: object) -> None:
        script = f"mkdir -p {self.root}/half; echo first >&2; echo boom >&2; exit 7"
        await self._alone([], ["sh", "-c", script])

    monkeypatch.setattr(image_root.RootBuilder, method, fail)
    with pytest.raises(ImageError, match=f"at step '{step}': sh ended with status 7: boom") as got:
        await build(rootless, RECIPE, folders=folders)
    assert got.value.details["stderr"] == "first\nboom\n"
    assert got.value.details["step"] == step
    assert builds.left_over(rootless) == set()


async def test_a_kernel_that_cannot_be_fetched(
    place: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (folders[0] / RECIPE / "recipe.toml").read_text()
    changed = text.replace('"linux-image-amd64"', '"linux-image-nonesuch"')
    (folders[0] / RECIPE / "recipe.toml").write_text(changed)
    with pytest.raises(ImageError, match="'kernel': package linux-image-nonesuch: apt-cache"):
        await build(place / "state", RECIPE, folders=folders)
    assert builds.left_over(place / "state") == set()


def _sleeping(marker: Path) -> list[str]:
    """A command that mounts something, has children, and stays."""
    script = f"mount -t tmpfs none {marker}; touch {marker}/up; sleep 1000 & setsid sleep 1000 & "
    return ["sh", "-c", script + f"echo ready; wait; : {marker}"]


async def test_a_cancelled_build_leaves_nothing(
    rootless: Path, place: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "mnt").mkdir()
    monkeypatch.setattr(image_root, "mmdebstrap_argv", lambda *_: _sleeping(place / "mnt"))
    ready = asyncio.Event()
    progress = Recorder(on_line=lambda line: ready.set() if line == "ready" else None)
    task = asyncio.create_task(build(rootless, RECIPE, progress=progress, folders=folders))
    await asyncio.wait_for(ready.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert builds.left_over(rootless) == set()
    assert builds.processes_of(str(place)) == []


KILLED = """
import asyncio, sys
from pathlib import Path
from cantelop_kernels import image_root
from tests.host import test_image_build
place = Path(sys.argv[1])
image_root.mmdebstrap_argv = lambda *_: test_image_build._sleeping(place / "mnt")
class Say:
    def started(self, step): pass
    def finished(self, step, *, cached): pass
    def line(self, text): print(text, flush=True)
asyncio.run(test_image_build.build(
    place / "state", "mine", progress=Say(), folders=[place / "recipes"]))
"""


def kill_a_build(place: Path) -> list[psutil.Process]:
    """Start a build in another process, kill it in the middle; the processes it had."""
    repository = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": repository},
        text=True,
    ) as builder:
        assert builder.stdout is not None
        assert "ready\n" in iter(builder.stdout.readline, "")
        children = psutil.Process(builder.pid).children(recursive=True)
        builder.send_signal(signal.SIGKILL)
        builder.wait(10)
    return children


async def test_a_killed_build_leaves_no_process_and_the_next_cleans_up(
    rootless: Path, place: Path, folders: list[Path]
) -> None:
    (place / "mnt").mkdir()
    children = await asyncio.to_thread(kill_a_build, place)
    assert len(children) >= 4
    _gone, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=10)
    assert alive == []
    assert len(list((rootless / "cache").glob("tmp-*"))) > 0
    builds.lend(rootless, "root")
    await build(rootless, RECIPE, folders=folders)
    assert list((rootless / "cache").glob("tmp-*")) == []


@pytest.fixture
async def small(place: Path, default_image: Image) -> AsyncIterator[Path]:
    """A state on a disk of 120 MiB that has the kernel, and no room for a root."""
    state = place / "small"
    state.mkdir()
    await run(["mount", "-t", "tmpfs", "-o", "size=120m", "none", str(state)], deadline=10)
    try:
        builds.lend(state, "kernel")
        yield state
    finally:
        await run(["umount", str(state)], deadline=10)


async def test_a_full_disk_while_a_program_writes(
    small: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_recipe: object, _mirror: object, root: Path) -> list[str]:
        return ["sh", "-c", f"mkdir {root}; dd if=/dev/zero of={root}/file bs=1M"]

    monkeypatch.setattr(image_root, "mmdebstrap_argv", fill)
    with pytest.raises(ImageError, match="'root: Debian packages': the disk is full") as caught:
        await build(small, RECIPE, folders=folders)
    assert "\n" not in str(caught.value) and "free some 3 GB" in caught.value.hint
    assert list(small.glob("cache/tmp-*")) == []


async def test_a_full_disk_while_the_builder_writes(
    small: Path, folders: list[Path], hollow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(self: image_root.RootBuilder, into: Path) -> None:
        with (into / "root.erofs").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(1 << 20))

    monkeypatch.setattr(image_root.RootBuilder, "pack", fill)
    with pytest.raises(ImageError, match="'root: file system': the disk is full"):
        await build(small, RECIPE, folders=folders)
    assert builds.left_over(small) == set()


def test_the_command_line_says_it_in_one_line(place: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cantelop_kernels", "image", "build", "nonesuch"],
        env={**os.environ, "CANTELOP_STATE": str(place / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "cantelop: no recipe for an image 'nonesuch'",
        "  hint: there are: python3",
    ]
    assert time.monotonic() - started < 30
