"""Image recipes: a folder with `recipe.toml` and `requirements.txt`, read once, then frozen.

Layer 2, used by the image builder.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError, ImageError
from .image_model import check_name


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is made of. `requirements` is the text of the pinned requirements file."""

    name: str
    suite: str
    architecture: str
    python: str
    user: str
    packages: tuple[str, ...]
    kernel: str
    busybox: str
    boot_modules: tuple[str, ...]
    extra_modules: tuple[str, ...]
    requirements: str

    def key(self, builder: int, *parts: str) -> str:
        """A digest of the named fields and of the builder's version: what a cache entry is for."""
        content = {name: asdict(self)[name] for name in parts}
        body = json.dumps([builder, content], sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()[:32]


def recipe_folders() -> list[Path]:
    """Where recipes are: the source tree's, or inside the installed package."""
    package = Path(__file__).parent
    return [package.parent / "guest" / "image", package / "_recipes"]


def load(name: str, folders: list[Path] | None = None) -> Recipe:
    """The recipe of that name. Raises ImageError when there is none, ConfigError when it is bad."""
    check_name(name)
    places = recipe_folders() if folders is None else folders
    found = next((place / name for place in places if (place / name).is_dir()), None)
    if found is None:
        known = sorted({path.parent.name for place in places for path in place.glob("*/*.toml")})
        hint = f"there are: {', '.join(known)}" if known else "none are installed"
        raise ImageError(f"no recipe for an image {name!r}", hint=hint)
    try:
        with (found / "recipe.toml").open("rb") as stream:
            table = tomllib.load(stream)
        requirements = (found / "requirements.txt").read_text()
        return _recipe(name, table, requirements)
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {name!r}: {error}", hint=f"fix {found}") from error


def _recipe(name: str, table: dict[str, Any], requirements: str) -> Recipe:
    wanted = {field.name: field.type for field in fields(Recipe)}
    del wanted["name"], wanted["requirements"]
    if wrong := table.keys() ^ wanted.keys():
        raise ValueError(f"unknown or missing: {', '.join(sorted(wrong))}")
    values: dict[str, Any] = {}
    for key, kind in wanted.items():
        value = table[key]
        if kind == "str" and isinstance(value, str):
            values[key] = value
        elif kind != "str" and isinstance(value, list) and all(isinstance(v, str) for v in value):
            values[key] = tuple(value)
        else:
            raise ValueError(f"{key} is not a {'string' if kind == 'str' else 'list of strings'}")
    return Recipe(name=name, requirements=requirements, **values)
