"""What a source distribution holds: the packages and what describes them.

setuptools adds ``tests/test*.py`` to every one, without the folders that those share. Tests are run from a checkout.
"""

from __future__ import annotations

from setuptools.command.egg_info import egg_info, write_file


class Sources(egg_info):  # type: ignore[misc]
    """The list of files without tests."""

    def find_sources(self) -> None:
        super().find_sources()
        self.filelist.files = [name for name in self.filelist.files if not name.startswith("tests/")]
        write_file(f"{self.egg_info}/SOURCES.txt", self.filelist.files)
