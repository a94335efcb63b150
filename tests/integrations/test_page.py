"""The page on trainers, and what of them needs neither library."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import autopar
from autopar.errors import UsageError
from autopar.integrations.planning import check_planning
from tests.runtime.test_training import on_ranks

PAGE = (Path(autopar.__file__).parent / "pages" / "integrations.md").read_text()
BLOCKS = re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_is_python() -> None:
    assert [name for name, _ in BLOCKS] == ["transformers", "torchtitan", "torchtitan"]
    for name, text in BLOCKS:
        compile(text, f"integrations.md, {name}", "exec")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not (find_spec("transformers") and find_spec("accelerate")), reason="transformers or accelerate is not installed")
def test_the_script_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, script), *_) = BLOCKS

    def run(rank: int) -> int:
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(script, "train.py", "exec"), names)
        return len([line for line in names["trainer"].state.log_history if "loss" in line])  # type: ignore[attr-defined]

    assert on_ranks(run, 2) == [4, 4]
    assert (tmp_path / "trained" / "model.safetensors").exists()


def test_the_package_loads_no_library() -> None:
    code = "import sys, autopar.integrations; sys.exit(bool({'torch', 'transformers', 'accelerate', 'torchtitan'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(("name", "lacking", "group"), [
    ("transformers", "transformers", "integrations"), ("transformers", "accelerate", "integrations"),
    ("torchtitan", "torchtitan", "torchtitan"),
])  # fmt: skip
def test_a_library_that_is_missing_is_named(name: str, lacking: str, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"autopar.integrations.{name}"
    for loaded in [one for one in sys.modules if one == module or one.partition(".")[0] == lacking]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, lacking, None)
    words = rf"{re.escape(module)}: .*\nhint: pip install 'autopar\[{group}\]'"
    with pytest.raises(ImportError, match=words):
        import_module(module)


def test_options_of_planning_are_those_of_plan() -> None:
    given = {"mesh": "2", "memory": "1GiB", "compute_dtype": "bfloat16"}
    assert check_planning(given) == given
    with pytest.raises(UsageError, match="planning has no option 'loss'\nhint: use some of mesh, devices, hardware"):
        check_planning({"loss": None})
    with pytest.raises(UsageError, match="no option 'compute_dtype'"):
        check_planning(given, own={"compute_dtype"})
