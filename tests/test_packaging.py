"""What describes the package, and what a source distribution of it holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
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
COLLECT = "from setuptools import setup; setup()"
"""Run with ``build_py --build-lib FOLDER``: writes all that a wheel holds but the compiled kernels."""
DATA = {".py", ".pxd", ".toml", ".css", ".js", ".md", ".svg", ".typed"}


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", *words], cwd=folder, capture_output=True, text=True, check=False)


def copy_checkout(to: Path, *, links: bool) -> Path:
    for name in ("autopar", "solvers", "cost_models"):
        shutil.copytree(ROOT / name, to / name, symlinks=links, ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    return to


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in DATA and path.is_file()}


def collect(folder: Path, into: Path) -> set[str]:
    """The files of a wheel made in a folder."""
    done = python(folder, COLLECT, "build_py", "--build-lib", str(into))
    assert done.returncode == 0, done.stderr
    return files_of(into)


@pytest.mark.skipif(not (ROOT / "autopar").is_dir(), reason="is made from a checkout")
@pytest.mark.parametrize("links", [True, False], ids=["links kept", "links followed"])
def test_distributions_hold_every_file_once(tmp_path: Path, links: bool) -> None:
    """``solvers`` and ``cost_models`` are in ``autopar`` and nowhere else, in a wheel, a source distribution and a wheel made of that."""
    pytest.importorskip("setuptools")
    (tmp_path / "copy").mkdir()
    checkout = copy_checkout(tmp_path / "copy", links=links)
    expected = {f"autopar/{name}" for name in files_of(checkout / "autopar")}
    expected |= {f"autopar/{folder}/{name}" for folder in ("solvers", "cost_models") for name in files_of(checkout / folder)}
    assert {"autopar/solvers/kernels/trws.pxd", "autopar/cost_models/hardware/h100-sxm.toml", "autopar/pages/step.svg"} <= expected
    assert collect(checkout, tmp_path / "wheel") == expected
    assert python(checkout, BUILD, str(tmp_path)).returncode == 0
    (archive,) = tmp_path.glob("autopar-*.tar.gz")
    with tarfile.open(archive) as made:
        assert not [item.name for item in made.getmembers() if not item.isfile() and not item.isdir()], "no link, as some tools drop them"
        made.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert {path.name for path in source.iterdir()} == {
        "LICENSE", "PKG-INFO", "README.md", "autopar", "autopar.egg-info", "pyproject.toml", "setup.cfg"
    }  # fmt: skip
    assert collect(source, tmp_path / "again") == expected


@pytest.mark.skipif((ROOT / "autopar").is_dir(), reason="an editable installation has its files in the checkout")
def test_the_installed_package_takes_one_name() -> None:
    files = metadata.files("autopar") or []
    tops = {file.parts[0] for file in files} - {"..", "__pycache__"}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"autopar"}
    assert {Path("autopar/solvers/solving.py"), Path("autopar/cost_models/mesh.py")} <= {Path(file) for file in files}


def test_a_copy_without_the_links_is_refused(tmp_path: Path) -> None:
    """As Python's ``zipfile`` unpacks one: a link becomes a file that holds its target."""
    pytest.importorskip("setuptools")
    bare_project(tmp_path)
    shutil.rmtree(tmp_path / "autopar" / "solvers")
    (tmp_path / "autopar" / "solvers").write_text("../solvers")
    done = python(tmp_path, BUILD, str(tmp_path))
    assert done.returncode != 0 and not list(tmp_path.glob("*.tar.gz"))
    assert "autopar/solvers lead to no folder" in done.stderr and "\nhint: install from a git clone" in done.stderr


def bare_project(folder: Path) -> None:
    """A project with this one's list of files, and little else."""
    from autopar import packing

    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["cmdclass"]["egg_info"]
    assert named == f"{packing.__name__}.{packing.Sources.__name__}"
    for name in ("autopar/__init__.py", "tests/test_one.py", "tests/__init__.py", *(f"{link}/__init__.py" for link in packing.LINKS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "autopar" / "packing.py").write_text(Path(packing.__file__).read_text())
    settings = f'[tool.setuptools]\npackages = ["autopar"]\n[tool.setuptools.cmdclass]\negg_info = "{named}"\n'
    (folder / "pyproject.toml").write_text(f'[project]\nname = "autopar"\nversion = "0"\n{settings}')


def test_a_source_distribution_has_no_stray_tests(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    bare_project(tmp_path)
    assert python(tmp_path, BUILD, str(tmp_path)).returncode == 0
    with tarfile.open(tmp_path / "autopar-0.tar.gz") as made:
        names = {name.partition("/")[2] for name in made.getnames()}
        listed = made.extractfile("autopar-0/autopar.egg-info/SOURCES.txt")
        assert listed is not None and b"tests" not in listed.read()
    assert {"autopar/__init__.py", "autopar/packing.py", "pyproject.toml"} <= names and not any("test" in name for name in names)
