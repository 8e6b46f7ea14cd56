"""The operator's settings: checked whole, frozen, unknown keys are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from cantelop_kernels.config import load
from cantelop_kernels.errors import ConfigError, NotFound


def write(folder: Path, text: str) -> Path:
    path = folder / "cantelop.toml"
    path.write_text(text)
    return path


def test_no_file_means_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path / "none.toml")
    assert not config.allow_emulation
    assert config.app("default").image == "python3"
    assert config.users == ["root"]


def test_an_app_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "uid_base = 700000\n[apps.big]\nmemory_mib = 2048\n")
    config = load(path, allow_emulation=True)
    assert (config.uid_base, config.allow_emulation) == (700000, True)
    assert config.app("big").memory_mib == 2048
    assert sorted(config.apps) == ["big", "default"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("alow_emulation = true", "alow_emulation"),
        ("[apps.a]\nmemory = 1", "memory"),
        ("uid_base = 'x'", "uid_base"),
        ("uid_base = 5", "uid_base"),
        ("[apps.a]\nmemory_mib = 1", "memory_mib"),
        ("apps = 3", "apps must be tables"),
        ("not toml", "cannot read"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(write(tmp_path, text))


def test_settings_are_frozen(tmp_path: Path) -> None:
    config = load(tmp_path / "none.toml")
    with pytest.raises(AttributeError, match="frozen"):
        config.allow_emulation = True
    with pytest.raises(AttributeError, match="frozen"):
        config.app("default").memory_mib = 1


def test_an_unknown_app_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="default"):
        load(tmp_path / "none.toml").app("nope")
