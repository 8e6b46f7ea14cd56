"""`cantelop kernelspec` against real Jupyter folders."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from cantelop_kernels.__main__ import main

SOURCE = Path(__file__).parents[2] / "share" / "jupyter" / "kernels" / "cantelop-python3"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")  # the environment has our kernelspec too
    return tmp_path / "data"


def cantelop(*args: str) -> int:
    return main(["kernelspec", *args])


def config_of(name: str) -> dict[str, Any]:
    spec = KernelSpecManager().get_kernel_spec(name)
    stanza = spec.metadata["kernel_provisioner"]
    assert stanza["provisioner_name"] == "cantelop"
    return stanza["config"]  # type: ignore[no-any-return]


def test_the_shipped_kernelspec() -> None:
    spec = json.loads((SOURCE / "kernel.json").read_text())
    assert spec["argv"] == ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    assert spec["display_name"] == "Python 3 (microVM)"
    assert spec["language"] == "python"
    assert spec["interrupt_mode"] == "signal"
    assert spec["metadata"]["debugger"] is True
    stanza = {"provisioner_name": "cantelop", "config": {"app": "default"}}
    assert spec["metadata"]["kernel_provisioner"] == stanza


@pytest.mark.parametrize("size", [32, 64])
def test_logos_have_the_size_of_their_name(size: int) -> None:
    png = (SOURCE / f"logo-{size}x{size}.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (size, size)


def test_install_is_found_by_jupyter(data: Path) -> None:
    assert cantelop("install", "--user") == 0
    spec = KernelSpecManager().get_kernel_spec("cantelop-python3")
    assert spec.display_name == "Python 3 (microVM)"
    assert config_of("cantelop-python3") == {"app": "default"}
    folder = data / "kernels" / "cantelop-python3"
    names = {"kernel.json", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg"}
    assert {file.name for file in folder.iterdir()} == names
    assert [one.name for one in folder.parent.iterdir()] == ["cantelop-python3"]


def test_every_option_reaches_the_stanza() -> None:
    args = ["--name", "Big", "--display-name", "Big one", "--app", "science", "--image", "r:1"]
    args += ["--vcpus", "2", "--memory-mib", "2048", "--env", "A", "B", "--env", "C"]
    assert cantelop("install", "--user", *args, "--allow-emulation") == 0
    assert KernelSpecManager().get_kernel_spec("big").display_name == "Big one"
    wanted = {"app": "science", "image": "r:1", "vcpus": 2, "memory_mib": 2048}
    assert config_of("big") == wanted | {"env": ["A", "B", "C"], "allow_emulation": True}


def test_another_name_shows_in_the_menu() -> None:
    assert cantelop("install", "--user", "--name", "big") == 0
    assert KernelSpecManager().get_kernel_spec("big").display_name == "Python 3 (microVM: big)"


def test_install_replaces_our_own_only(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cantelop("install", "--user", "--vcpus", "1") == 0
    assert cantelop("install", "--user", "--vcpus", "2") == 0
    assert config_of("cantelop-python3")["vcpus"] == 2
    other = data / "kernels" / "other"
    other.mkdir()
    (other / "kernel.json").write_text('{"argv": ["x"], "display_name": "Other"}')
    assert cantelop("install", "--user", "--name", "other") != 0
    assert "not a kernelspec of Cantelop's" in capsys.readouterr().err
    assert json.loads((other / "kernel.json").read_text())["display_name"] == "Other"


def test_prefix_says_when_jupyter_does_not_look_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cantelop("install", "--prefix", str(tmp_path / "p")) == 0
    said = capsys.readouterr()
    assert str(tmp_path / "p/share/jupyter/kernels/cantelop-python3") in said.out
    assert f"JUPYTER_PATH={tmp_path / 'p/share/jupyter'}" in said.err


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    assert cantelop("install", "--user", "--memory-mib", "777") == 0
    capsys.readouterr()
    assert cantelop("ls", "--json") == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed["cantelop-python3"]["config"] == {"app": "default", "memory_mib": 777}
    assert "python3" not in listed
    assert cantelop("ls") == 0
    assert "777" in capsys.readouterr().out


def test_ls_survives_what_others_left_there(data: Path) -> None:
    for number, text in enumerate(["{", "[]", '{"metadata": 3}', '{"metadata": {}}']):
        folder = data / "kernels" / f"k{number}"
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(text)
    assert cantelop("ls") == 0


def test_remove() -> None:
    assert cantelop("install", "--user", "--name", "big") == 0
    assert cantelop("remove", "big") == 0
    with pytest.raises(NoSuchKernel):
        KernelSpecManager().get_kernel_spec("big")


def test_remove_refuses_what_is_not_ours(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = data / "kernels" / "other"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["x"], "display_name": "Other"}')
    assert cantelop("remove", "other") != 0
    assert "not a kernelspec of Cantelop's" in capsys.readouterr().err
    assert other.exists()


def test_remove_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cantelop("remove", "nothing") != 0
    assert "cantelop kernelspec ls" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--name", "a/b"],
        ["--name", ".."],
        ["--app", "no spaces"],
        ["--image", "../x"],
        ["--env", "A-B"],
        ["--vcpus", "-1"],
    ],
)
def test_bad_input_writes_nothing(args: list[str], data: Path) -> None:
    assert cantelop("install", "--user", *args) != 0
    assert not data.exists()


def test_no_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert cantelop("install", "--prefix", str(in_the_way)) != 0
    assert "cannot write to" in capsys.readouterr().err
