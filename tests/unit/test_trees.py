"""Folders that somebody else has filled are taken away whole, and nothing beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cantelop_kernels import trees
from cantelop_kernels.errors import CantelopError


def deep(folder: Path, levels: int) -> None:
    """A tree deeper than a path can name, and than Python can recurse."""
    fd = os.open(folder, os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


async def test_a_tree_of_any_depth_goes(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    folder.mkdir()
    deep(folder, 5000)
    await trees.remove(folder)
    assert list(tmp_path.iterdir()) == []


async def test_links_go_and_what_they_point_to_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "canary").write_text("alive")
    folder = tmp_path / "k"
    folder.mkdir()
    (folder / "link").symlink_to(target)
    await trees.remove(folder)
    (tmp_path / "k").symlink_to(target)
    await trees.remove(tmp_path / "k")
    assert [one.name for one in tmp_path.iterdir()] == ["target"]
    assert (target / "canary").read_text() == "alive"


async def test_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    await trees.remove(tmp_path / "k")


async def test_what_cannot_be_removed_is_told_and_its_name_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k" / "sub").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/does/not/exist")  # no rm there
        with pytest.raises(CantelopError, match="could not be removed"):
            await trees.remove(tmp_path / "k")
    assert not (tmp_path / "k").exists()
    (left,) = trees.leftovers(tmp_path, "k")
    await trees.remove_leftover(left)
    assert trees.leftovers(tmp_path, "k") == []
