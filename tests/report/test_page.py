"""The page, the trace, the memory over the step and the words for how layers lie."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autopar.plan import Plan
from autopar.recording import record
from autopar.report import chrome_trace, fragment, html, units
from autopar.report.memory_timeline import held
from autopar.report.parallelism_words import differing, ways
from autopar.search import find_plan
from tests.graphs import bucket_plan, machine, random_plan, two_layer_plan, two_layers

VOID = {"meta", "br", "link", "img", "input", "hr"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Reader(HTMLParser):
    """Checks that tags are closed in order; keeps texts by tag and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


PLANS = [two_layer_plan, bucket_plan, *(lambda seed=seed: random_plan("dp=2,tp=2", seed) for seed in range(6))]


@pytest.mark.parametrize("make", PLANS)
def test_memory_over_the_step_has_the_peak_that_was_predicted(make: object) -> None:
    plan: Plan = make()  # type: ignore[operator]
    found = held(plan)
    assert max(found.levels) == found.levels[found.peak] == plan.predicted.peak_memory_bytes_per_rank
    assert sum(size for _, size in found.parts) == plan.predicted.peak_memory_bytes_per_rank


def test_the_page_says_what_the_plan_says_and_fetches_nothing() -> None:
    plan = bucket_plan()
    named = plan.model_copy(update={"model": plan.model.model_copy(update={"target": "<script>alert(1)</script>"})})
    page = html(named)
    found = read(page)
    assert not [row for row in found.attributes if row[1] in ("src", "href", "action", "data")]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page)
    assert "<script>alert" not in page
    data = json.loads(next(text for text in found.texts["script"] if text.startswith("{")))
    assert data["streams"] == ["compute", "node"]
    assert data["end"] == pytest.approx(plan.predicted.step_seconds)
    assert data["levels"][data["peak"]][1] == plan.predicted.peak_memory_bytes_per_rank
    assert data["limit"] == plan.memory_limit_bytes_per_rank
    assert {data["kinds"][bar[1]] for bar in data["bars"]} == {"forward", "backward", "moving", "stalled", "optimizer"}
    assert all(bar[2] >= 0 and bar[2] + bar[3] <= data["end"] * (1 + 1e-6) + 1e-9 for bar in data["bars"])
    assert {"How the layers lie on the mesh", "What fills the memory at the peak"} <= set(found.texts["h2"])
    assert "viewport" in page and "@media print" in page


def test_the_bound_the_plan_and_the_baselines_are_bars_of_one_scale() -> None:
    plan = two_layer_plan()
    page = html(plan)
    drawn = re.findall(r"<span>([^<]+)</span><i style='width: ([0-9.]+)%'>", page.partition("<h2>How")[0])
    bars = {name: float(share) for name, share in drawn}
    most = max([plan.objective.seconds, *(row.objective_seconds or 0.0 for row in plan.baselines.values() if row.feasible)])
    assert bars["this plan"] == pytest.approx(100 * plan.objective.seconds / most, abs=0.1)
    assert bars["no plan takes less"] == pytest.approx(100 * plan.objective.bound_seconds / most, abs=0.1)
    assert set(bars) - {"this plan", "no plan takes less"} == {name for name, row in plan.baselines.items() if row.feasible}


@pytest.mark.parametrize("make", PLANS)
def test_exposed_communication_is_what_no_operator_hides(make: object) -> None:
    plan: Plan = make()  # type: ignore[operator]
    exposed = plan.predicted.step_seconds - plan.predicted.compute_seconds - plan.predicted.optimizer_seconds
    priced = plan.created_by.cost_model == "roofline" and plan.predicted.communication_seconds > 0
    assert (f"<b>{units.seconds(max(exposed, 0.0))}</b><span>exposed" in html(plan)) == priced


def test_no_section_is_empty() -> None:
    plan = two_layer_plan()
    alone = plan.model_copy(update={"baselines": {}, "collectives": ()})
    assert {"Baselines", "Collectives"} <= set(read(html(plan)).texts["h2"])
    assert not {"Baselines", "Collectives"} & set(read(html(alone)).texts["h2"])


def test_a_large_gap_is_explained() -> None:
    plan = two_layer_plan()
    objective = plan.objective.model_copy(update={"bound_seconds": plan.objective.seconds / 2, "gap": 0.5})
    assert "at most 2.0 times the optimum" in html(plan.model_copy(update={"objective": objective}))


def test_what_a_notebook_shows_styles_itself_alone() -> None:
    part = two_layer_plan()._repr_html_()
    assert part == fragment(two_layer_plan()) and "<script" not in part and "<body" not in part
    style = re.sub(r"@media [^{]*\{(.*)\}", r"\1", "\n".join(read(part).texts["style"]))
    selectors = [one for rule in re.findall(r"([^{}]+)\{", style) for one in rule.split(",")]
    assert selectors and all(one.strip().startswith(".autopar") for one in selectors)


def test_the_trace_has_modules_arguments_memory_and_the_optimizer() -> None:
    plan = bucket_plan()
    events = json.loads(chrome_trace(plan))["traceEvents"]
    levels = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(levels) == plan.predicted.peak_memory_bytes_per_rank
    timed = {event["name"]: event for event in events if event["ph"] == "X"}
    assert timed["f0"]["args"]["operator"] and timed["f0"]["args"]["arguments"] and "module" in timed["f0"]["args"]
    assert timed["all_gather of 6 values from w0"]["args"]["axes"] == ["dp"]
    starts, ends = ({event["id"]: event for event in events if event["ph"] == kind} for kind in "sf")
    stalls = [event for event in events if event.get("cat") == "stalled"]
    assert len(starts) == len(ends) == len(stalls) > 0, "an arrow to each stall"
    assert all(starts[number]["ts"] <= ends[number]["ts"] and starts[number]["tid"] != ends[number]["tid"] for number in starts)
    assert events[0]["name"] == "process_name" and plan.model.target in events[0]["args"]["name"]
    last = max(timed.values(), key=lambda event: event["ts"] + event["dur"])
    assert last["name"] == f"optimizer: {plan.model.optimizer}"


def pinned(mesh: str, pins: dict[str, str]) -> dict[str, str]:
    """The words for the weights of two layers pinned so."""
    found = find_plan(two_layers(width=64, hidden=256), machine(mesh), constraints=pins, baselines=False)
    return {way.name: way.words for way in ways(record(found, target="two", memory_limit=2**34))}


def test_ways_are_named_as_by_those_who_write_them() -> None:
    data = pinned("dp=2", {"input:x": "S0 R", "module:layers.*": "S0 R", "layers.*.weight": "R R"})
    assert set(data.values()) == {"data parallel over dp"}
    tensor = {"input:x": "R R", "module:layers.0": "R S0"}
    tensor |= {"layers.0.weight": "S0 R", "layers.1.weight": "R S0"}
    found = find_plan(two_layers(width=64, hidden=256), machine("tp=2"), constraints=tensor, baselines=False)
    rows = ways(record(found, target="two", memory_limit=2**34))
    assert [(row.layers[0], row.words) for row in rows] == [
        ("layers.0.weight", "column parallel over tp"), ("layers.1.weight", "row parallel over tp"),
    ]  # fmt: skip
    kept = pinned("dp=2", {"input:x": "S0 R", "module:layers.*": "S0 R", "layers.*.weight": "S0 R"})
    assert set(kept.values()) == {"FSDP over dp"}


def test_equal_layers_that_lie_in_different_ways_are_told() -> None:
    plan = two_layer_plan()
    assert not list(differing(plan)), "two layers of different shapes are not equal"
    row = next(iter(plan.parameters.values()))
    rows = {f"layers.{index}.w": row.model_copy(update={"tensor": f"t{index}", "spec": "R R" if index else "S01 R"}) for index in range(4)}
    said = list(differing(plan.model_copy(update={"parameters": rows})))
    assert said == ["layers.*.w: layers.0.w split over dp and tp, the other 3 whole on every rank"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here to draw the page")
def test_the_page_draws_in_a_browser_without_an_error(tmp_path: Path) -> None:
    probe = """<script>window.onerror = text => { document.title = "error: " + text };</script>"""
    root = "document.documentElement"
    over = f"' over by ' + ({root}.scrollWidth - {root}.clientWidth) + ' drawn ' + document.querySelector('canvas.steps').height"
    done = f"<script>document.title = document.title + {over}</script></body>"
    plan = bucket_plan()
    named = plan.model_copy(update={"model": plan.model.model_copy(update={"target": "zoo:gpt2," + "layers=170," * 9})})
    page = html(named).replace("<style>", probe + "<style>", 1).replace("</body>", done)
    (tmp_path / "plan.html").write_text(page)
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,800", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "plan.html").as_uri(),
    ]  # fmt: skip
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", dumped)
    assert title is not None and re.search(r" over by 0 drawn [1-9]\d+$", title[1]), dumped[:500]
