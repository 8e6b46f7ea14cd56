"""Cache entries: whole or not there, whatever happened to them or to their builder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cantelop_kernels.image_cache import Cache

KEY, OTHER = "k" * 32, "o" * 32


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", "py")


def fill(cache: Cache, key: str = KEY) -> Path:
    with cache.building("root", key) as work:
        (work / "deep").mkdir()
        (work / "deep" / "file").write_text("content")
        (work / "other").write_text("more")
    entry = cache.get("root", key)
    assert entry is not None
    return entry


def test_an_entry_is_found_again(cache: Cache) -> None:
    assert cache.get("root", KEY) is None
    entry = fill(cache)
    assert (entry / "deep" / "file").read_text() == "content"
    assert cache.get("root", KEY) == entry
    assert cache.get("kernel", KEY) is None


@pytest.mark.parametrize("damage", ["change", "truncate", "remove", "add", "sidecar", "no sidecar"])
def test_a_broken_entry_is_deleted_never_used(cache: Cache, damage: str) -> None:
    entry = fill(cache)
    match damage:
        case "change":
            (entry / "other").write_text("MORE")
        case "truncate":
            (entry / "other").write_text("")
        case "remove":
            (entry / "other").unlink()
        case "add":
            (entry / "deep" / "new").touch()
        case "sidecar":
            (entry / "entry.json").write_text('{"files": ')
        case "no sidecar":
            (entry / "entry.json").unlink()
    assert cache.get("root", KEY) is None
    assert not entry.exists()
    fill(cache)


def test_a_failed_build_leaves_nothing(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), cache.building("root", KEY) as work:
        (work / "half").touch()
        raise ZeroDivisionError
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_newer_entry_replaces_the_older(cache: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path / "cache", "py-slim")
    fill(other, KEY)
    old, new = fill(cache), fill(cache, OTHER)
    assert not old.exists()
    assert cache.get("root", OTHER) == new
    assert other.get("root", KEY) is not None


def test_the_same_entry_can_be_built_again(cache: Cache) -> None:
    assert fill(cache) == fill(cache)


def test_what_a_killed_build_left_is_swept(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "cache" / "tmp-py-abcdefgh" / "entry").mkdir(parents=True)
    (tmp_path / "cache" / "tmp-py-slim-abcdefgh").mkdir()
    entry = fill(cache)
    cache.sweep()
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {entry.name, "tmp-py-slim-abcdefgh"}
