"""Files are replaced at once; what is no regular file is written to, and links are kept."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from fusionzoo.files import replacing, write_text


def test_a_file_is_replaced_by_a_whole_one_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(ValueError, match="half"), replacing(path) as partial:
        partial.write_text("ne")
        raise ValueError("half")
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["there", "not there"])
def test_a_link_is_kept_and_its_target_written(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if target == "there":
        (folder / "a.txt").write_text("old")
    (tmp_path / "near").symlink_to("elsewhere/a.txt")
    (tmp_path / "link").symlink_to(tmp_path / "near")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "near").is_symlink()
    assert (folder / "a.txt").read_text() == "new"
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["a.txt", "elsewhere", "link", "near"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_named_pipe_is_written_to(linked: bool, tmp_path: Path) -> None:
    pipe = path = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(path, "text")
    reader.join(10)
    assert received == ["text"]
    assert pipe.is_fifo()
    assert path.is_symlink() == linked


def test_a_device_stays_a_device_and_its_error_names_it(tmp_path: Path) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # as /dev/full
        full.open("wb").close()
    except PermissionError:
        pytest.skip("devices can be made by root alone")
    with pytest.raises(OSError, match=r"No space left on device: .*full"):
        write_text(full, "text")
    assert full.is_char_device()
    assert list(tmp_path.iterdir()) == [full]


def test_a_folder_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")
    assert tmp_path.is_dir()
