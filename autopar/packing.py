"""What a distribution holds: the packages and what describes them.

``autopar/solvers`` and ``autopar/cost_models`` are links to folders beside ``autopar``. Distributions hold the files behind them, once.
setuptools adds ``tests/test*.py`` to every source distribution, without the folders that those share. Tests are run from a checkout.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.egg_info import egg_info, write_file
from setuptools.errors import SetupError

LINKS = ("autopar/solvers", "autopar/cost_models")


class Sources(egg_info):  # type: ignore[misc]
    """The list of files without tests.

    Raises:
        SetupError: the links were lost on the way here, as in an archive unpacked by Python's ``zipfile``.
    """

    def find_sources(self) -> None:
        lost = [name for name in LINKS if not Path(name).is_dir()]
        if lost:
            words = f"{' and '.join(lost)} lead to no folder: a copy lost the links to the folders of these names beside autopar"
            raise SetupError(f"{words}\nhint: install from a git clone or a .tar.gz archive, or restore the links")
        super().find_sources()
        self.filelist.files = [name for name in self.filelist.files if not name.startswith("tests/")]
        write_file(f"{self.egg_info}/SOURCES.txt", self.filelist.files)
