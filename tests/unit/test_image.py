"""The image store: only whole images are found, names move atomically, used ones stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cantelop_kernels.errors import ImageError
from cantelop_kernels.image import Image, ImageStore
from cantelop_kernels.image_model import PARTS, SCHEMA, sha256


def parts(folder: Path, content: str = "one") -> dict[str, Any]:
    """A folder of small files that are no real image, and a manifest that is true of them."""
    folder.mkdir(parents=True)
    for part in PARTS:
        (folder / part).write_text(f"{content} {part}")
    files = {
        part: {"size": (folder / part).stat().st_size, "sha256": sha256(folder / part)}
        for part in PARTS
    }
    return {"schema": SCHEMA, "files": files}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "state")


def publish(store: ImageStore, tmp_path: Path, name: str = "py", content: str = "one") -> Image:
    folder = tmp_path / f"parts-{name}-{content}-{os.urandom(4).hex()}"
    return store.publish(name, folder, parts(folder, content))


def test_a_published_image_is_found_by_name_and_digest(store: ImageStore, tmp_path: Path) -> None:
    image = publish(store, tmp_path)
    assert store.resolve("py", verify=True) == image
    assert store.resolve(image.digest).path == image.path
    assert store.resolve(image.digest[:12]).digest == image.digest
    assert [i.name for i in store.ls()] == ["py"]
    assert image.root.read_text() == "one root.erofs"
    assert image.size == sum(len(f"one {part}") for part in PARTS)


def test_files_are_readable_by_unprivileged_vmms(store: ImageStore, tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        image = publish(store, tmp_path)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in image.path.iterdir()} == {0o644}
    assert image.path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["py", "0123456789ab", "../etc", "", "x" * 100, "A B"])
def test_a_missing_image_says_what_to_type(store: ImageStore, name: str) -> None:
    with pytest.raises(ImageError, match="no image") as caught:
        store.resolve(name)
    assert "cantelop image build" in caught.value.hint


@pytest.mark.parametrize("part", PARTS)
def test_a_truncated_part_is_noticed_at_once(store: ImageStore, tmp_path: Path, part: str) -> None:
    image = publish(store, tmp_path)
    os.truncate(image.path / part, 3)
    with pytest.raises(ImageError, match=f"corrupt: {part} has 3 bytes"):
        store.resolve("py")


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_noticed_at_once(store: ImageStore, tmp_path: Path, part: str) -> None:
    image = publish(store, tmp_path)
    (image.path / part).unlink()
    with pytest.raises(ImageError, match=f"corrupt: {part}: No such file") as caught:
        store.resolve("py")
    assert caught.value.hint == "build again: cantelop image build py"


def test_changed_content_is_noticed_by_verify(store: ImageStore, tmp_path: Path) -> None:
    image = publish(store, tmp_path)
    image.root.write_text("two root.erofs")
    store.resolve("py")
    with pytest.raises(ImageError, match=r"root\.erofs is not what was built"):
        store.resolve("py", verify=True)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 1, "files": {}}', '{"schema": 1, "files": [1]}', "null"],
)
def test_a_broken_manifest(store: ImageStore, tmp_path: Path, text: str) -> None:
    image = publish(store, tmp_path)
    (image.path / "manifest.json").write_text(text)
    with pytest.raises(ImageError, match=r"corrupt: manifest\.json"):
        store.resolve("py")
    assert store.ls() == []


def test_a_manifest_of_another_image(store: ImageStore, tmp_path: Path) -> None:
    one = publish(store, tmp_path)
    two = publish(store, tmp_path, "other", "two")
    (one.path / "manifest.json").write_text(json.dumps(two.manifest))
    with pytest.raises(ImageError, match="manifest is not of this image"):
        store.resolve("py")


def test_publishing_again_replaces_a_corrupt_image(store: ImageStore, tmp_path: Path) -> None:
    image = publish(store, tmp_path)
    image.root.write_text("two root.erofs")
    publish(store, tmp_path)
    store.resolve("py", verify=True)
    assert [path.name for path in image.path.parent.iterdir()] == [image.digest]


def test_publishing_the_same_again_changes_nothing(store: ImageStore, tmp_path: Path) -> None:
    before = publish(store, tmp_path).root.stat().st_ino
    assert publish(store, tmp_path).root.stat().st_ino == before


def test_a_name_moves_and_the_old_image_is_pruned(store: ImageStore, tmp_path: Path) -> None:
    old = publish(store, tmp_path)
    new = publish(store, tmp_path, content="two")
    assert store.resolve("py").digest == new.digest
    assert [image.name for image in store.ls()] == ["py", ""]
    assert store.prune() == [old.digest]
    assert not old.path.exists()


def test_prune_leaves_what_is_in_use(store: ImageStore, tmp_path: Path) -> None:
    old = publish(store, tmp_path)
    publish(store, tmp_path, content="two")
    with store.hold(old):
        assert store.in_use(old)
        assert store.prune() == []
    assert store.prune() == [old.digest]


def test_rm_refuses_while_another_process_holds_it(store: ImageStore, tmp_path: Path) -> None:
    image = publish(store, tmp_path)
    code = (
        "import sys; from pathlib import Path; from cantelop_kernels.image import ImageStore\n"
        "store = ImageStore(Path(sys.argv[1]))\n"
        "with store.hold(store.resolve('py')): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ImageError, match="is in use by a sandbox"):
            store.rm("py")
        assert store.resolve("py", verify=True) == image
        other.stdin.close()
        other.wait(10)
    store.rm("py")
    assert not image.path.exists()


def test_rm_of_one_of_two_names_keeps_the_image(store: ImageStore, tmp_path: Path) -> None:
    publish(store, tmp_path)
    publish(store, tmp_path, "other")
    store.rm("py")
    assert [image.name for image in store.ls()] == ["other"]
    store.rm(store.resolve("other").digest)
    assert store.ls() == []


def test_rm_of_nothing(store: ImageStore) -> None:
    with pytest.raises(ImageError, match="no image 'py'"):
        store.rm("py")


def test_rm_of_a_corrupt_image(store: ImageStore, tmp_path: Path) -> None:
    image = publish(store, tmp_path)
    (image.path / "manifest.json").unlink()
    store.rm("py")
    assert not image.path.exists()


def test_hold_of_a_removed_image(store: ImageStore, tmp_path: Path) -> None:
    image = publish(store, tmp_path)
    store.rm("py")
    with pytest.raises(ImageError, match="is gone"), store.hold(image):
        pass


def test_a_name_that_is_a_path_cannot_be_published(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not an image name"):
        publish(store, tmp_path / "x", name="..")
    assert list((tmp_path / "state" / "images" / "names").iterdir()) == []
