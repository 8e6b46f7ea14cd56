"""The pure parts of the image builder: orders, formats, command lines, parsers."""

from __future__ import annotations

import io
import lzma
import os
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from cantelop_kernels import image_build, image_recipe
from cantelop_kernels.errors import ConfigError, ImageError
from cantelop_kernels.image_apt import Mirror, PrivateApt, parse_codename, parse_mirror
from cantelop_kernels.image_initramfs import agent_folder, cpio_entry, stage, write_cpio
from cantelop_kernels.image_kernel import lighten, load_order, parse_deps, zstd_payload
from cantelop_kernels.image_packages import copyright_licences, python_licences
from cantelop_kernels.image_root import mmdebstrap_argv, pip_download_argv

LONG = f"License: {'x' * 200}\nClassifier: License :: OSI Approved :: MIT License"

DEPS = """\
kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/fs/mbcache.ko.xz kernel/lib/crc16.ko.xz
kernel/fs/jbd2/jbd2.ko.xz:
kernel/fs/mbcache.ko.xz:
kernel/lib/crc16.ko.xz:
kernel/fs/erofs/erofs.ko.xz: kernel/lib/libcrc32c.ko.xz
kernel/lib/libcrc32c.ko.xz:
kernel/arch/crc32c_generic.ko.xz:
kernel/drivers/virtio-rng.ko:
"""


def names(order: list[str]) -> list[str]:
    return [Path(path).name.partition(".")[0] for path in order]


def test_modules_load_after_what_they_need() -> None:
    order = load_order(parse_deps(DEPS), ["crc32c_generic", "erofs", "ext4", "virtio_rng"])
    assert names(order) == [
        *("crc32c_generic", "libcrc32c", "erofs"),
        *("crc16", "mbcache", "jbd2", "ext4", "virtio-rng"),
    ]


def test_a_module_is_loaded_once() -> None:
    assert names(load_order(parse_deps(DEPS), ["jbd2", "ext4"])).count("jbd2") == 1


def test_modules_built_in_are_left_out_and_unknown_ones_an_error() -> None:
    assert load_order(parse_deps(DEPS), ["vmgenid"], builtin=["vmgenid"]) == []
    with pytest.raises(ImageError, match="no module 'vmgenid'"):
        load_order(parse_deps(DEPS), ["vmgenid"])


def test_the_recipe_loads_crc32c_before_all_others() -> None:
    assert image_recipe.load("python3").boot_modules[0] == "crc32c_generic"


def test_a_module_loses_signature_and_types() -> None:
    body = b"\x7fELF body\0.BTF\0.text\0"
    trailer = bytes(8) + (5).to_bytes(4, "big") + b"~Module signature appended~\n"
    assert lighten(body + b"pkcs7" + trailer) == b"\x7fELF body\0.btf\0.text\0"
    assert lighten(lighten(body)) == lighten(body)


def bzimage(payload: bytes) -> bytes:
    image = bytearray(512 * 3)
    image[0x1F1] = 2
    image[0x202:0x206] = b"HdrS"
    image[0x248:0x24C] = (16).to_bytes(4, "little")
    image[0x24C:0x250] = (len(payload) + 4).to_bytes(4, "little")
    return bytes(image) + bytes(16) + payload + b"size" + b"rest"


def test_the_payload_of_a_kernel_is_cut_out_exactly() -> None:
    assert zstd_payload(bzimage(b"\x28\xb5\x2f\xfdkernel")) == b"\x28\xb5\x2f\xfdkernel"


@pytest.mark.parametrize(
    "image", [b"", bytes(4096), bzimage(lzma.compress(b"kernel"))], ids=["empty", "zero", "xz"]
)
def test_what_is_no_zstd_kernel_is_refused(image: bytes) -> None:
    with pytest.raises(ImageError, match="kernel"):
        zstd_payload(image)


def test_an_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "busybox").write_bytes(os.urandom(10_001))
    (tree / "bin" / "busybox").chmod(0o700)
    (tree / "bin" / "sh").symlink_to("busybox")
    (tree / "list").write_text("a\nb\n")
    (tree / "list").chmod(0o600)
    archive = io.BytesIO()
    write_cpio(tree, archive)
    again = io.BytesIO()
    (tree / "list").touch()
    write_cpio(tree, again)
    assert again.getvalue() == archive.getvalue()
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(
        ["cpio", "--quiet", "-idm"], input=archive.getvalue(), cwd=out, check=True, timeout=30
    )
    assert (out / "bin" / "busybox").read_bytes() == (tree / "bin" / "busybox").read_bytes()
    assert (out / "bin" / "busybox").stat().st_mode & 0o777 == 0o755
    assert (out / "list").stat().st_mode & 0o777 == 0o644
    assert (out / "bin" / "sh").readlink() == Path("busybox")


def test_members_of_an_archive_are_aligned() -> None:
    for length in range(1, 9):
        assert len(cpio_entry("n" * length, 0o100644, b"d" * length, 1)) % 4 == 0


def test_the_initramfs_has_what_init_calls(tmp_path: Path) -> None:
    kernel, tree = tmp_path / "kernel", tmp_path / "tree"
    (kernel / "mod").mkdir(parents=True)
    (kernel / "busybox").touch()
    (kernel / "mod" / "ext4.ko").touch()
    (kernel / "kernel.json").write_text('{"boot": ["ext4.ko"], "extra": []}')
    stage(kernel, tree)
    assert (tree / "modules.list").read_text() == "ext4.ko\n"
    assert (tree / "cantelop" / "cantelop_guest" / "main.py").exists()
    shared = {path.name for path in (tree / "cantelop" / "cantelop_kernels").iterdir()}
    assert shared == {"__init__.py", "relay.py", "wire.py"}
    assert not list(tree.rglob("*.pyc"))
    applets = {path.name for path in (tree / "bin").iterdir()}
    init = (agent_folder() / "init.sh").read_text()
    used = {word for word in ("cat", "ln", "cp", "mkdir", "mount", "sleep") if f"{word} " in init}
    assert used <= applets


TARGETS = """\
https://mirror.example/debian|bookworm|Debian
https://mirror.example/debian|bookworm-updates|Debian
https://security.example/debian-security|bookworm-security|Debian-Security
https://other.example/apt|bookworm|Other
"""


def test_the_mirror_is_the_hosts() -> None:
    expected = Mirror("https://mirror.example/debian", "https://security.example/debian-security")
    assert parse_mirror(TARGETS, "bookworm") == expected


def test_the_mirror_is_found_before_the_first_update_too() -> None:
    targets = TARGETS.replace("Debian-Security", "").replace("|Debian", "|").replace("|Other", "|O")
    mirror = parse_mirror(targets, "bookworm")
    assert mirror is not None
    assert mirror.main == "https://mirror.example/debian"
    assert mirror.security == "https://security.example/debian-security"


def test_a_host_without_a_debian_archive() -> None:
    assert parse_mirror("https://archive.example/ubuntu|noble|Ubuntu\n", "noble") is None
    assert parse_mirror("", "") is None


def test_sources_of_a_suite() -> None:
    mirror = Mirror("M", "S")
    assert [line.split("] ")[1] for line in mirror.sources("trixie")] == [
        *("M trixie main", "M trixie-updates main", "S trixie-security main"),
    ]
    assert len(mirror.sources("sid")) == 1
    assert len(Mirror("M", None).sources("trixie")) == 2


def test_codename() -> None:
    assert parse_codename('ID=debian\nVERSION_CODENAME="bookworm"\n') == "bookworm"
    assert parse_codename("VERSION_CODENAME=trixie\n") == "trixie"
    assert parse_codename("ID=debian\n") == ""


def test_apt_stays_in_its_folder(tmp_path: Path) -> None:
    apt = PrivateApt(tmp_path, ["deb M sid main"])
    options = apt.options()[1::2]
    assert f"Dir::State={tmp_path}" in options
    assert "Dir::Etc::SourceParts=/dev/null" in options
    assert (tmp_path / "sources.list").read_text() == "deb M sid main\n"


def test_mmdebstrap_command() -> None:
    recipe = image_recipe.load("python3")
    argv = mmdebstrap_argv(recipe, Mirror("M", None), Path("/new"))
    assert argv[:2] == ["mmdebstrap", "--mode=root"]
    assert "--variant=minbase" in argv
    assert argv[-4:-2] == ["trixie", "/new"]
    assert {"git", "sudo", "python3-pip"} <= set(argv[5].removeprefix("--include=").split(","))


def test_pip_takes_wheels_of_the_guest_by_hash_only() -> None:
    argv = pip_download_argv(image_recipe.load("python3"), Path("/r.txt"), Path("/w"))
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(argv)
    assert "manylinux_2_41_x86_64" in argv and "manylinux_2_42_x86_64" not in argv
    assert argv[argv.index("--python-version") + 1] == "3.13"


def test_every_requirement_is_pinned_and_hashed() -> None:
    text = image_recipe.load("python3").requirements
    lines = [line for line in text.replace("\\\n", "").splitlines() if line and line[0] != "#"]
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    pinned = {line.partition("==")[0] for line in lines}
    assert {"ipykernel", "ipywidgets", "numpy", "pandas", "matplotlib", "requests"} <= pinned


def test_licences_of_a_debian_copyright_file() -> None:
    text = (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n"
        "Files: *\nLicense: GPL-2+\n some text\n\nLicense: Expat\nLicense:\n"
    )
    assert copyright_licences(text) == ["Expat", "GPL-2+"]
    assert copyright_licences("This is free software. License: whatever\n") == []


@pytest.mark.parametrize(
    ("metadata", "licences"),
    [
        ("License-Expression: BSD-3-Clause\nLicense: old", ["BSD-3-Clause"]),
        ("License: MIT", ["MIT"]),
        (LONG, ["MIT License"]),
        ("Classifier: Topic :: Other", []),
    ],
)
def test_licences_of_a_python_package(tmp_path: Path, metadata: str, licences: list[str]) -> None:
    (tmp_path / "METADATA").write_text(f"Name: x\nVersion: 1\n{metadata}\n")
    assert python_licences(PathDistribution(tmp_path)) == licences


def write_recipe(folder: Path, change: str = "", cut: str = "") -> list[Path]:
    source = next(p for p in image_recipe.recipe_folders() if p.is_dir()) / "python3"
    (folder / "mine").mkdir()
    text = (source / "recipe.toml").read_text().replace(cut, "") if cut else change
    text = text or (source / "recipe.toml").read_text()
    (folder / "mine" / "recipe.toml").write_text(text)
    (folder / "mine" / "requirements.txt").write_text("numpy==2\n")
    return [folder]


def test_a_recipe_is_read_whole(tmp_path: Path) -> None:
    recipe = image_recipe.load("mine", write_recipe(tmp_path))
    assert (recipe.name, recipe.suite, recipe.requirements) == ("mine", "trixie", "numpy==2\n")


@pytest.mark.parametrize(
    ("change", "cut", "why"),
    [
        ("suite = ", "", "Invalid value"),
        ("suite = 1", "", "unknown or missing"),
        ("", 'suite = "trixie"', "unknown or missing: suite"),
    ],
)
def test_a_bad_recipe(tmp_path: Path, change: str, cut: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        image_recipe.load("mine", write_recipe(tmp_path, change, cut))


def test_a_missing_recipe_names_those_there_are() -> None:
    with pytest.raises(ImageError, match="no recipe") as caught:
        image_recipe.load("nope")
    assert caught.value.hint == "there are: python3"


def test_the_key_of_a_part_changes_with_what_it_is_made_from(tmp_path: Path) -> None:
    one = image_recipe.load("python3")
    two = image_recipe.load("mine", write_recipe(tmp_path))
    kernel, root = image_build.KERNEL_FIELDS, image_build.ROOT_FIELDS
    assert one.key(1, *kernel) == two.key(1, *kernel) != two.key(2, *kernel)
    assert one.key(1, *root) != two.key(1, *root)


def test_every_field_of_a_recipe_is_in_a_key() -> None:
    keyed = {*image_build.KERNEL_FIELDS, *image_build.ROOT_FIELDS, "name"}
    assert keyed == set(image_recipe.Recipe.__slots__)


def test_missing_tools_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_build, "_PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(ImageError, match="missing: apt-get, chroot") as caught:
        image_build.check_host()
    assert "erofs-utils" in caught.value.hint and "mmdebstrap" in caught.value.hint


def test_a_build_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ImageError, match="needs root"):
        image_build.check_host()
