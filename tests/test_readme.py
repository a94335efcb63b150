"""The code of README and pages runs and prints what they say; they name only commands and files that exist."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.main import VERBS
from autopar.solvers.kernels import COMPILED
from autopar.verify.launch import run_ranks

README = Path(__file__).resolve().parents[1] / "README.md"
PAGES = Path(autopar.__file__).parent / "pages"
BLOCK = re.compile(r"^```(\w+)( notest| train)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not COMPILED, reason="the text is of a search whose kernels are compiled: plain ones try fewer moves of a list")
def test_the_example_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    page = PAGES / "reading.md"
    (code,) = code_of(README)
    (expected,) = [text for language, _, text in BLOCK.findall(page.read_text()) if language == "text"]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if pytestconfig.getoption("--update-golden"):
        page.write_text(page.read_text().replace(expected, printed))
    else:
        assert steady(printed) == steady(expected)
    assert (tmp_path / "plan.json").exists()


def code_of(page: Path) -> list[str]:
    """The blocks of Python that run as they stand."""
    return [text for language, kind, text in BLOCK.findall(page.read_text()) if language == "python" and not kind]


PACKAGES = [Path(str(import_module(name).__file__)).parent / "README.md" for name in ("autopar", "autopar.cost_models", "autopar.solvers")]


@pytest.mark.parametrize("page", [*PACKAGES, *sorted(PAGES.glob("*.md"))], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for text in code_of(page):
        exec(compile(text, str(page), "exec"), names)


def test_readme_is_a_page_whose_links_lead_somewhere() -> None:
    assert len(README.read_text().splitlines()) <= 150
    inside = {page.name for page in PAGES.glob("*.md")}
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert {link.rpartition("/")[2] for link in links if "/pages/" in link} == {*inside, "step.svg"}, "every page is linked"
    for link in links:
        assert stands(link), link


def stands(file: str) -> bool:
    """Whether a file of the checkout is there. Installed, ``solvers`` and ``cost_models`` are in ``autopar`` alone."""
    package = Path(autopar.__file__).parent
    return any((folder / file).is_file() for folder in (README.parent, package.parent, package))


CHANGE = re.compile(r"^### ([^\n]+): (\d+) files[^\n]*\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
LISTED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def test_the_page_of_changes_lists_files_that_exist() -> None:
    changes = CHANGE.findall((Path(autopar.__file__).parent / "README.md").read_text())
    assert {name for name, *_ in changes} >= {"A random operator", "A collective kind", "A baseline", "A search bound"}
    for name, count, text in changes:
        files = LISTED.findall(text)
        assert len(files) == int(count), name
        for file in files:
            assert stands(file), f"{name}: {file}"


def test_the_training_script_trains_as_one_device_does(tmp_path: Path) -> None:
    """On four ranks: two epochs, saved, and two more on another mesh."""
    (script,) = [text for _, kind, text in BLOCK.findall((PAGES / "training.md").read_text()) if kind == " train"]
    assert len(script.splitlines()) <= 40

    def run(mesh: str, first: int, last: int) -> list[str]:
        def rank_main(rank: int) -> str:
            sys.argv = ["train.py", mesh, str(tmp_path / "checkpoint"), str(first), str(last)]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own words about checkpoints
                exec(compile(script, "train.py", "exec"), {})
            return printed.getvalue()

        return run_ranks(rank_main, 4)[0].splitlines()

    printed = [*run("dp=2,tp=2", 0, 2), *run("dp=4", 2, 4)]
    found = [float(number) for line in printed for number in re.findall(r"\d+\.\d+", line)]
    assert len(printed) == 4 and found == pytest.approx(run_ranks(lambda _: one_device(4), 1, alone=True)[0], rel=1e-4)


def one_device(epochs: int) -> list[float]:
    """What the script does, without autopar: the loss of each epoch's last batch, then that of the evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512, bias=False), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 8))
    x, found = torch.randn(576, 64), []
    y = x[:, :8].argmax(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        model.train()
        for inputs, targets in zip(x.split(128), y.split(128), strict=True):
            value = nn.functional.cross_entropy(model(inputs), targets)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        found += [value.item(), nn.functional.cross_entropy(model(x[:100]), y[:100]).item()]
    return found


@pytest.mark.slow
def test_the_way_from_install_to_a_trained_model(tmp_path: Path) -> None:
    """The page's files and its shell lines as one piece, from the plan on, in an empty folder."""
    page = (PAGES / "training.md").read_text()
    for name, text in re.findall(r"^```python (\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    (lines,) = [text for language, _, text in BLOCK.findall(page) if language == "sh"]
    install, _, rest = lines.partition("\n")
    assert install.startswith("pip install ")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "-e"], input=rest, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(number) for number in re.findall(r"^step \d+: loss ([\d.]+)$", ran.stdout, re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in left if name != "__pycache__"] == ["model.py", "plan.html", "plan.json", "train.py"]


def steady(text: str) -> str:
    """Without the solver's seconds."""
    return re.sub(r"solved in [0-9.]+ s", "solved", text)


def test_commands_are_those_of_the_program() -> None:
    assert set(re.findall(r"^\| `autopar (\w+)", (PAGES / "commands.md").read_text(), re.MULTILINE)) == set(VERBS)
    assert set(re.findall(r"^    autopar (\w+)", README.read_text(), re.MULTILINE)) <= set(VERBS)


def test_the_layout_table_names_what_exists() -> None:
    table = (Path(autopar.__file__).parent / "README.md").read_text().partition("## The road of a call")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    package = Path(autopar.__file__).parent
    assert len(names) > 12
    for name in names:
        places = (package.parent / name, package / name, README.parent / name)
        assert any(place.exists() for place in places), name
