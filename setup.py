"""What pyproject.toml cannot say: a wheel has conf/, eval/ and train/ inside the package, where `specdec` finds them."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("conf", "eval", "train")  # as in specdec.files.folder


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in FOLDERS:
            inside = Path(self.build_lib) / "specdec" / name
            shutil.copytree(name, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildPackage})
