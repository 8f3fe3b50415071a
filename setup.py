"""Puts train.py and the launch configurations, which lie beside the package, into the wheel."""

from pathlib import Path
from shutil import copy2

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "pointup"
        (package / "accelerate_configs").mkdir(parents=True, exist_ok=True)
        copy2("train.py", package / "train.py")
        for path in Path("accelerate_configs").glob("*.yaml"):
            copy2(path, package / "accelerate_configs" / path.name)


setup(cmdclass={"build_py": BuildWithShippedFiles})
