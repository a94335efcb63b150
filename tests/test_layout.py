"""What the tree promises: lower never imports higher, torch is not loaded before it is needed, private torch names have one home."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import networkx as nx
import pytest

import autopar

ROOT = Path(autopar.__file__).resolve().parents[1]  # of the packages under test: the checkout's, or the installed ones
CONFIGURATION = Path(__file__).resolve().parents[1]
SIBLINGS = ("solvers", "cost_models")  # links in autopar to folders beside it; one folder each where autopar is installed
BACKWARDS = {
    ("autopar.search.ilp.critical_path", "autopar.search.ilp.model"): "for types alone; it goes when both are in rooms of their own",
}
"""Imports that close a circle, with the reason why they may."""
HOME_OF_PRIVATE_TORCH = ROOT / "autopar" / "torch_compat"


def sources() -> list[Path]:
    """Every file of the package, behind links too, by the path that is its module's name."""
    folders = (ROOT / "autopar", *(ROOT / "autopar" / name for name in SIBLINGS))
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


def imported(path: Path) -> Iterator[str]:
    """Every module or name imported in a file, by its whole name: at its top, in a function, or for types alone."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def import_graph() -> nx.DiGraph:
    """Module -> module it imports. That Python loads a module's package first is not counted."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()}
    graph = nx.DiGraph()
    for module, path in modules.items():
        for name in imported(path):
            found = name if name in modules else name.rpartition(".")[0]  # a module, or a name in one
            if found in modules:
                graph.add_edge(module, found)
    return graph


def run(*words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, cwd=folder, check=False
    )


def test_lower_never_imports_higher() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        capture_output=True, text=True, cwd=CONFIGURATION, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_circle_of_imports() -> None:
    graph = import_graph()
    assert set(BACKWARDS) <= set(graph.edges), "an exception that is not needed any more"
    graph.remove_edges_from(BACKWARDS)
    circles = [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
    assert not circles + list(nx.nodes_with_selfloops(graph))


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_know_neither_torch_nor_autopar_nor_each_other(name: str) -> None:
    files = [path for path in sources() if path.is_relative_to(ROOT / "autopar" / name)]
    assert files
    for path in files:
        foreign = [module for module in imported(path) if module.split(".")[0] in {"torch", "autopar", *SIBLINGS}]
        assert all(module.startswith(f"autopar.{name}.") for module in foreign), path


@pytest.mark.skipif(not (ROOT / "solvers").is_dir(), reason="of a checkout; an installed package has each folder once")
@pytest.mark.parametrize("name", SIBLINGS)
def test_a_sibling_is_the_folder_of_its_name(name: str) -> None:
    """A copy in place of the link, as tools that follow links make, is what Python imports: it must not fall behind."""
    folder, linked = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.suffix in {".py", ".pxd", ".toml", ".md"}}
        for place in (ROOT / name, ROOT / "autopar" / name)
    )
    assert folder == linked, f"autopar/{name} is not {name}: make it a link again (ln -sfn ../{name} autopar/{name})"


def test_private_torch_names_have_one_home() -> None:
    private = re.compile(r"^torch\b.*\._(?!_)")
    used = re.compile(r"\btorch\._(?!_)\w+")
    for path in sources():
        if path.parent != HOME_OF_PRIVATE_TORCH:
            assert not [name for name in imported(path) if private.match(name)], path
            assert not used.findall(_code(path)), path


def _code(path: Path) -> str:
    """A file without comments and the contents of strings (docstrings may name what they like)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize(
    "code",
    [
        "import autopar, autopar.solvers, autopar.cost_models",
        "import autopar.check, autopar.compare, autopar.recording, autopar.search, autopar.report.page",
        "import autopar; autopar.Plan, autopar.ShardingSpec, autopar.Mesh, autopar.Hardware, autopar.AutoparError, autopar.plan",
        "import autopar.cli.show, autopar.cli.plan, autopar.cli.diff, autopar.cli.explain, autopar.cli.check",
    ],
)
def test_no_torch_without_a_model(code: str) -> None:
    done = run("-c", f"import sys; {code}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_help_loads_almost_nothing() -> None:
    heavy = "{'torch', 'numpy', 'pulp', 'highspy', 'pydantic', 'typer', 'rich'}"
    done = run("-c", f"import sys; from autopar.cli.main import main; main(['--help']); sys.exit(bool({heavy} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr


def test_public_names_resolve() -> None:
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    assert set(autopar.__all__) <= set(dir(autopar))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        autopar.nothing  # noqa: B018  looked up for its error


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    code = "autopar.plan, autopar.check, autopar.verify.launch, autopar.reshard as r"
    called = "autopar.plan, autopar.check, autopar.verify, r"
    assert run("-c", f"import sys, {code}; sys.exit(not all(map(callable, ({called}))))").returncode == 0


OWN = """
import solvers, cost_models

assert solvers.WHOSE == cost_models.WHOSE == "theirs"

def target():
    from autopar.zoo import build
    return build("mlp")
"""
PLANS = """
import sys
import solvers
from model import target
from autopar.cli.main import main

status = main(["plan", "model.py:target", "--mesh", "dp=2", "--effort", "low", "-o", "plan.json"])
assert solvers.WHOSE == "theirs" and sys.modules["autopar.solvers"] is not solvers
sys.exit(status)
"""


@pytest.mark.parametrize("package", [True, False])
def test_a_repository_may_have_solvers_and_cost_models_of_its_own(tmp_path: Path, package: bool) -> None:
    for name in SIBLINGS:
        own = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
        own.parent.mkdir(exist_ok=True)
        own.write_text('WHOSE = "theirs"')
    (tmp_path / "model.py").write_text(OWN)
    (tmp_path / "plans.py").write_text(PLANS)
    done = run("plans.py", folder=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert autopar.load(tmp_path / "plan.json").mesh == {"dp": 2}


def test_no_file_has_a_forbidden_name() -> None:
    forbidden = {"utils", "helpers", "manager", "handler", "misc"}
    assert not [path for path in sources() if forbidden & {path.stem, *path.parts}]


def test_names_that_an_ide_completes_are_those_that_resolve() -> None:
    """What ``autopar/__init__.py`` imports for types alone comes from the same packages as what it gives on first use."""
    source = ast.parse((ROOT / "autopar" / "__init__.py").read_text())
    block = next(node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {alias.name: str(node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed.keys() == autopar._HOME.keys() == set(autopar.__all__)
    for name, module in typed.items():
        assert getattr(import_module(module), name) is getattr(autopar, name), name
