"""Collect the packages and scripts, whether or not this checkout has symbolic links.

fusionzoo/ links to encoders/, fusion/, datasets/ and the three scripts. Git for Windows and some
zip tools write text files in place of links, and an sdist has none, so the build never follows
them: pyproject.toml maps the three packages to the folders and `fusionzoo.recipes` to configs/, and
the scripts are listed here.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

LINKED = ("encoders", "fusion", "datasets")
RECIPES = tuple(  # folders of YAML files
    f"fusionzoo.recipes{folder}" for folder in ("", ".benchmarks", ".papers")
)
SCRIPTS = ("train", "embed", "benchmark")


class BuildPy(build_py):
    """Build `fusionzoo.scripts` from the scripts at the root."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of every module of a package."""
        modules = super().find_package_modules(package, package_dir)
        if package != "fusionzoo.scripts":
            return modules
        scripts = [(package, name, f"{name}.py") for name in SCRIPTS]
        return [module for module in modules if module[1] not in SCRIPTS] + scripts


packages = find_packages(include=["fusionzoo", "fusionzoo.*"])
packages += [f"fusionzoo.{name}" for name in find_packages() if name.split(".")[0] in LINKED]
setup(packages=sorted({*packages, *RECIPES}), cmdclass={"build_py": BuildPy})
