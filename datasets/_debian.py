"""Download and unpack Debian packages with apt; needs no root, installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fusionzoo.errors import FusionZooError


def check_tools(package: str) -> None:
    """Raise an error that says what to do instead where apt is missing."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FusionZooError(
                f"there is no {tool} here: unpack Debian's package {package} by hand and give"
                " --data.root the folder"
            )


def unpack(package: str, folder: Path) -> Path:
    """Download a package into `folder` and return the subfolder that it is unpacked to."""
    file = _download(package, folder)
    print("unpacking")
    _run(["dpkg-deb", "-x", str(file), str(folder / "root")], folder)
    return folder / "root"


def _download(package: str, folder: Path) -> Path:
    """Download with the system's package lists, else with private lists that need no root."""
    private = [
        option
        for key, subfolder in (("State", "state"), ("Cache", "cache"))
        for option in ("-o", f"Dir::{key}={folder / subfolder}")
    ]
    apt = ["apt-get", "-o", "APT::Sandbox::User="]
    if subprocess.run([*apt, "download", package], cwd=folder, check=False).returncode:
        for subfolder in ("state/lists/partial", "cache/archives/partial"):
            (folder / subfolder).mkdir(parents=True)
        _run([*apt, *private, "update"], folder)
        _run([*apt, *private, "download", package], folder)
    return next(folder.glob("*.deb"))


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise FusionZooError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
