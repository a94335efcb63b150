"""What describes the package, and what a source distribution of it holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = Path(autopar.__file__).parent / "pages"


def test_the_description_is_whole() -> None:
    """URLs by names that registries know, a classifier for each Python from the least on, the changelog's first version is this one."""
    assert {"Homepage", "Documentation", "Changelog", "Source", "Issues"} == PROJECT["urls"].keys()
    assert all(url.startswith("https://example.org/autopar") for url in PROJECT["urls"].values())
    named = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", item) for item in PROJECT["classifiers"]]
    minors = [int(found[1]) for found in named if found]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}" and minors == list(range(minors[0], minors[-1] + 1))
    (first, *_) = re.findall(r"^## (\S+?),? ", (PAGES / "changelog.md").read_text(), re.MULTILINE)
    assert first == autopar.__version__
    assert "changelog.md" in (PAGES / "contributing.md").read_text()


BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_a_source_distribution_has_no_stray_tests(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    from autopar import packing

    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["cmdclass"]["egg_info"]
    assert named == f"{packing.__name__}.{packing.Sources.__name__}"
    (tmp_path / "autopar").mkdir()
    (tmp_path / "tests").mkdir()
    for name in ("autopar/__init__.py", "tests/test_one.py", "tests/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "autopar" / "packing.py").write_text(Path(packing.__file__).read_text())
    settings = f'[tool.setuptools]\npackages = ["autopar"]\n[tool.setuptools.cmdclass]\negg_info = "{named}"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "autopar"\nversion = "0"\n{settings}')
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=tmp_path, capture_output=True, check=True)
    with tarfile.open(tmp_path / "autopar-0.tar.gz") as made:
        names = {name.partition("/")[2] for name in made.getnames()}
        listed = made.extractfile("autopar-0/autopar.egg-info/SOURCES.txt")
        assert listed is not None and b"tests" not in listed.read()
    assert {"autopar/__init__.py", "autopar/packing.py", "pyproject.toml"} <= names and not any("test" in name for name in names)
