"""Files are replaced at once; what is no regular file is written to, and links are kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusionzoo.files import replacing, replacing_folder, write_files, write_text


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


@pytest.mark.parametrize("name", ["report.partial", "report.html.partial", ".report.partial"])
def test_what_stands_beside_an_output_is_neither_followed_nor_lost(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "precious.txt").write_text("precious")
    (tmp_path / "shared" / name).symlink_to(tmp_path / "precious.txt")
    write_text(tmp_path / "shared" / "report.html", "new")
    with replacing_folder(tmp_path / "shared" / "report") as folder:
        write_text(folder / "part.txt", "new")
    assert (tmp_path / "precious.txt").read_text() == "precious"
    assert (tmp_path / "shared" / name).is_symlink()
    assert not (tmp_path / "shared" / "report.html").is_symlink()
    assert sorted(x.name for x in (tmp_path / "shared").iterdir()) == sorted(
        ["report", "report.html", name]
    )


def test_two_outputs_of_one_stem_are_written_side_by_side(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.npy") as first, replacing(tmp_path / "a.json") as second:
        first.write_text("npy")
        second.write_text("json")
    assert [(tmp_path / name).read_text() for name in ("a.npy", "a.json")] == ["npy", "json"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_the_next_write_removes_what_a_killed_process_left(kind: str, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    left = tmp_path / f"a[1].txt.{'0f' * 3}-1-0123abcd.partial"  # of another host
    if kind == "file":
        left.write_text("half")
    elif kind == "folder":
        left.mkdir()
    else:
        left.symlink_to(tmp_path / "precious.txt")
    write_text(tmp_path / "a[1].txt", "new")
    assert os.path.lexists(left)  # another process may be writing it
    os.utime(left, (0, 0), follow_symlinks=False)
    write_text(tmp_path / "a[1].txt", "new")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a[1].txt", "precious.txt"]


def test_a_part_of_a_dead_process_of_this_host_is_removed_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with replacing(tmp_path / "a.txt") as part:
        part.write_text("new")
        name = part.name.replace(f"-{os.getpid()}-", f"-{child.pid}-")
        (tmp_path / name).write_text("half")
        write_text(tmp_path / "a.txt", "other")  # whose process lives is left alone
        assert sorted(x.name for x in tmp_path.iterdir()) == sorted(["a.txt", part.name])
    assert [x.name for x in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_is_replaced_by_a_whole_one_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "index"
    for text in ("old", "new"):
        with replacing_folder(path) as folder:
            (folder / text).write_text(text)
        assert [x.name for x in path.iterdir()] == [text]
    with pytest.raises(ValueError, match="half"), replacing_folder(path) as folder:
        raise ValueError("half")
    assert [x.name for x in tmp_path.rglob("*")] == ["index", "new"]


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


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "old", "sub/b.bin": b"old"})
    (tmp_path / "c").mkdir()
    with pytest.raises(OSError, match="c"):  # no file may take the place of a folder
        write_files(tmp_path, {"a.txt": "new", "sub/b.bin": b"new", "c": "new"})
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "sub/b.bin").read_text() == "old"
    write_files(tmp_path, {"a.txt": "new", "sub/b.bin": b"new"})
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "sub/b.bin").read_text() == "new"
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["a.txt", "b.bin", "c", "sub"]
