"""Wheels, the sdist and editable installs are whole, whether or not a checkout has links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv

import fusionzoo

ROOT = Path(__file__).parents[1]
LINKED = ("encoders", "fusion", "datasets")
SCRIPTS = ("train.py", "embed.py", "benchmark.py")
pytestmark = pytest.mark.slow

OF_A_RELEASE = tuple(
    f"fusionzoo/zoo/trained-models/{x}/" for x in ("hanzi-concat", "stamps-concat")
)


@pytest.fixture(scope="module")
def build_env() -> Iterator[DefaultIsolatedEnv]:
    """A virtual environment with the build backend that pyproject.toml asks for."""
    with DefaultIsolatedEnv() as env:
        env.install(ProjectBuilder(ROOT).build_system_requires)
        yield env


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "checkout", links=request.param)


@pytest.fixture
def unlinked(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "checkout", links=False)


def copy_checkout(target: Path, links: bool) -> Path:
    """Copy this working tree; without links they become text files, as in Git for Windows."""
    for name in working_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
        if (target / name).is_symlink() and not links:
            destination = os.readlink(target / name)
            (target / name).unlink()
            (target / name).write_text(destination)
    return target


def working_files() -> list[str]:
    """Return the files of this working tree that git does not ignore."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listed.splitlines() if os.path.lexists(ROOT / name)]


def package_files() -> set[str]:
    """Return what belongs into site-packages, links followed."""
    files = set()
    for name in working_files():
        if name in SCRIPTS:
            files.add(f"fusionzoo/scripts/{name}")
        elif name.split("/")[0] in LINKED:
            files.add(f"fusionzoo/{name}")
        elif name.startswith("configs/"):
            files.add(f"fusionzoo/recipes/{name.removeprefix('configs/')}")
        elif name.startswith(OF_A_RELEASE):
            continue
        elif name.startswith("fusionzoo/") and not (ROOT / name).is_symlink():
            files.add(name)
    return files


def build(
    kind: Literal["wheel", "sdist", "editable"], tree: Path, env: DefaultIsolatedEnv, out: Path
) -> Path:
    builder = ProjectBuilder.from_isolated_env(env, tree)
    env.install(builder.get_requires_for_build(kind))
    return Path(builder.build(kind, out))


def contents(wheel: Path) -> set[str]:
    """Return the files of a wheel, but for its metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"fusionzoo-{fusionzoo.__version__}.dist-info/"
    assert f"{metadata}METADATA" in names
    return {name for name in names if not name.startswith(metadata)}


def install(wheel: Path, folder: Path) -> str:
    """Unpack a wheel into a virtual environment that sees this one's libraries; return its python.

    Not this one's fusionzoo, if that is an editable install: its .pth file is not read.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries))
    return str(folder / "bin" / "python")


def run(*command: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_is_whole_and_brings_no_generic_package(
    checkout: Path, build_env: DefaultIsolatedEnv, tmp_path: Path
) -> None:
    wheel = build("wheel", checkout, build_env, tmp_path / "dist")
    assert {"fusionzoo/fusion/attention/mbt.py", "fusionzoo/scripts/train.py"} < package_files()
    assert contents(wheel) == package_files()
    shutil.rmtree(checkout)
    python = install(wheel, tmp_path / "venv")
    assert "mbt" in run(python, "-P", "-m", "fusionzoo", "zoo", cwd=tmp_path)
    where = run(python, "-P", "-c", "import fusionzoo; print(fusionzoo.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path / "venv"))


def test_a_wheel_holds_code_pages_and_recipes_and_its_metadata_is_whole(
    build_env: DefaultIsolatedEnv, tmp_path: Path
) -> None:
    checkout = copy_checkout(tmp_path / "checkout", links=True)
    wheel = build("wheel", checkout, build_env, tmp_path / "dist")
    kinds = {Path(name).suffix for name in contents(wheel)}
    assert kinds == {".py", ".html", ".js", ".yaml", ".json", ".md", ".typed", ".safetensors"}
    assert {name.split("/")[0] for name in contents(wheel)} == {"fusionzoo"}
    metadata = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt"}
    listed = set(zipfile.ZipFile(wheel).namelist()) - contents(wheel)
    assert {name.partition("/")[2] for name in listed} == {*metadata, "licenses/LICENSE"}
    assert wheel.stat().st_size < 4e6  # bytes


def test_an_installed_wheel_finds_the_recipes_and_trains(
    build_env: DefaultIsolatedEnv, tmp_path: Path
) -> None:
    checkout = copy_checkout(tmp_path / "checkout", links=True)
    wheel = build("wheel", checkout, build_env, tmp_path / "dist")
    shutil.rmtree(checkout)
    python = install(wheel, tmp_path / "venv")
    small = ["--data.samples", "200", "--train.epochs", "1", "--log", "none", "--out", "run"]
    assert "fusion: gmu" in run(python, "-P", "-m", "fusionzoo", "train", *small, cwd=tmp_path)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    code = (
        "from fusionzoo.config import BenchmarkConfig, RunConfig, from_args\n"
        "print(from_args(RunConfig, ['--config', 'stamps']).out)\n"
        "print(from_args(BenchmarkConfig, ['--config', 'benchmarks/mfeat']).data['name'])"
    )
    assert run(python, "-P", "-c", code, cwd=tmp_path).split() == ["runs/stamps", "mfeat"]


@pytest.mark.filterwarnings("ignore:Editable installation")  # from the build backend
def test_a_checkout_without_links_trains_once_it_is_installed_editable(
    unlinked: Path, build_env: DefaultIsolatedEnv, tmp_path: Path
) -> None:
    python = install(build("editable", unlinked, build_env, tmp_path / "dist"), tmp_path / "venv")
    small = ["--data.samples", "200", "--train.epochs", "1", "--log", "none"]
    said = run(python, "train.py", *small, "--out", str(tmp_path / "run"), cwd=unlinked)
    assert "fusion: gmu" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "benchmark --help-all shows all" in run(
        python, "-P", "-m", "fusionzoo", "benchmark", "--help", cwd=tmp_path
    )
    code = (
        "import datasets, fusionzoo.datasets, fusionzoo.scripts.embed as embed\n"
        "print(datasets.Dataset.__name__, fusionzoo.datasets.__file__, embed.__file__)\n"
        "try: import fusionzoo.tests\nexcept ImportError: print('no tests')"
    )
    assert run(python, "-P", "-c", code, cwd=tmp_path).split(maxsplit=3) == [
        "Dataset",
        str(unlinked / "datasets" / "__init__.py"),
        str(unlinked / "embed.py"),
        "no tests\n",
    ]
    code = "try: import datasets\nexcept ImportError as error: print(error)"
    assert "import `fusionzoo.datasets`" in run(python, "-c", code, cwd=unlinked)


def test_an_sdist_holds_the_scripts_and_no_tests_and_builds_a_whole_wheel(
    checkout: Path, build_env: DefaultIsolatedEnv, tmp_path: Path
) -> None:
    sdist = build("sdist", checkout, build_env, tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive)
        archive.extractall(tmp_path, filter="data")
    top = tmp_path / f"fusionzoo-{fusionzoo.__version__}"
    names = {path.name for path in top.iterdir()}
    assert {*SCRIPTS, *LINKED, "fusionzoo", "configs", "pyproject.toml", "setup.py"} <= names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert not {"tests", "results", "perf", "notebooks", ".ci"} & names
    assert contents(build("wheel", top, build_env, tmp_path / "wheel")) == package_files()


@pytest.mark.parametrize("module", ["transformers.BertModel", "sentence_transformers", "peft"])
def test_beside_the_wheel_other_libraries_can_be_imported(module: str, fresh_python: str) -> None:
    """A requirement that cannot be imported beside the newest torch would break them."""
    package, _, name = module.partition(".")
    code = f"from {package} import {name}" if name else f"import {package}"
    run(fresh_python, "-P", "-c", code, cwd=Path(fresh_python).parent)


@pytest.fixture(scope="module")
def fresh_python(build_env: DefaultIsolatedEnv, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the wheel, three extras and the newest libraries."""
    folder = tmp_path_factory.mktemp("fresh")
    wheel = build("wheel", copy_checkout(folder / "tree", links=True), build_env, folder)
    venv.create(folder / "env", with_pip=shutil.which("uv") is None)
    python = str(folder / "env" / "bin" / "python")
    install = ["uv", "pip", "install", "--python"] if shutil.which("uv") else []
    install = [*install, python] if install else [python, "-m", "pip", "install"]
    run(*install, "--quiet", f"{wheel}[lora,sentence-transformers,stamps]", cwd=folder)
    return python


@pytest.mark.nightly
def test_pip_installs_every_extra_in_a_fresh_environment(tmp_path: Path) -> None:
    """`.ci/run` installs the extras with uv."""
    checkout = copy_checkout(tmp_path / "checkout", links=True)
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "-e", f"{checkout}[all,loops]", cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    assert "gmu" in run(python, "-m", "fusionzoo", "zoo", cwd=tmp_path)
