"""The page, the trace, the memory over the step and the words for how layers lie."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autopar.compare import explain
from autopar.compare.simulated_step import SimulatedStep
from autopar.cost_models import load_hardware
from autopar.plan import Plan
from autopar.recording import record
from autopar.recording.search_record import search_record
from autopar.report import chrome_trace, fragment, html, units
from autopar.report.layer_details import OUTSIDE, Groups, group_of
from autopar.report.memory_timeline import held
from autopar.report.parallelism_words import differing, ways
from autopar.report.planning_command import planning_command
from autopar.report.timeline import call_name
from autopar.report.utilisation import utilisation
from autopar.search import find_plan
from tests.graphs import bucket_plan, machine, random_plan, two_layer_plan, two_layers
from tests.report.pages import read_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


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
    found = read_page(page)
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
    assert {"Baselines", "Collectives"} <= set(read_page(html(plan)).texts["h2"])
    assert not {"Baselines", "Collectives"} & set(read_page(html(alone)).texts["h2"])


def test_a_large_gap_is_explained() -> None:
    plan = two_layer_plan()
    objective = plan.objective.model_copy(update={"bound_seconds": plan.objective.seconds / 2, "gap": 0.5})
    assert "at most 2.0 times the optimum" in html(plan.model_copy(update={"objective": objective}))


def test_a_search_that_the_limit_cut_is_the_reason_for_a_large_gap() -> None:
    plan = two_layer_plan()
    objective = plan.objective.model_copy(update={"bound_seconds": plan.objective.seconds / 4, "gap": 0.75})
    cut = plan.model_copy(update={"objective": objective, "search": search_record("normal", True, (), 1.0, 1.0)})
    assert "at most 4.0 times the optimum" in html(cut) and "The time limit cut the search" in html(cut)


def test_mfu_is_the_models_operations_over_what_the_ranks_could_do() -> None:
    found_plan = find_plan(two_layers(batch=16, width=64, hidden=256), machine("dp=2,tp=2"), baselines=False)
    plan = record(found_plan, target="two", memory_limit=2**34)
    found = utilisation(plan)
    assert found is not None
    products = 2 * 16 * 64 * 256
    assert products * 5 <= found.flops <= products * 5 * 1.05, "two products in forward, three in backward, and a little elementwise"
    dtype, peak = found.dtype, plan.hardware["peak_flops"][found.dtype]
    ranks = math.prod(plan.mesh.values())
    assert found.share == pytest.approx(found.flops / (plan.predicted.step_seconds * ranks * peak))
    assert f"<b>{100 * found.share:.3g} % MFU</b>" in html(plan) and f"TFLOP/s in {dtype}" in html(plan)
    created = plan.created_by.model_copy(update={"cost_model": "communication"})
    assert utilisation(plan.model_copy(update={"created_by": created})) is None, "computation is not priced"


def test_recomputed_operators_are_no_operations_of_the_model() -> None:
    plan = bucket_plan()
    first = plan.ops[0]
    again = first.model_copy(update={"name": f"{first.name}@again", "phase": "recompute"})
    assert utilisation(plan.model_copy(update={"ops": (*plan.ops, again)})) == utilisation(plan) is not None


def test_bars_are_of_the_layer_that_makes_or_reads() -> None:
    assert group_of("layers.3.mlp.0") == "layers.3" and group_of("head") == "head" and group_of("") == OUTSIDE
    plan = bucket_plan()
    groups = Groups(plan)
    assert {groups.of(row.name) for row in plan.ops} == {group_of(row.module) for row in plan.ops}
    for row in plan.collectives:
        if row.id is not None:
            reader = next((op for op in plan.ops if op.name == row.members[0].before), None)
            assert reader is None or groups.of(row.id) == group_of(reader.module)


@pytest.mark.parametrize("make", PLANS)
def test_each_layer_has_its_bars_its_weights_and_the_reasons(make: object) -> None:
    plan: Plan = make()  # type: ignore[operator]
    page = read_page(html(plan))
    data = json.loads(next(text for text in page.texts["script"] if text.startswith("{")))
    assert all(0 <= name[4] < len(data["groups"]) and name[0] for name in data["names"]), "every bar has a name and a group"
    rows = ways(plan)
    for group, places in zip(data["groups"], data["groupWays"], strict=True):
        assert [data["mesh"]["ways"][place]["title"] for place in places] == [
            way.title for way in rows if any(group == group_of(name.rpartition(".")[0]) for name in way.layers)
        ]
    for way, reason in zip(rows, data["reasons"], strict=True):
        assert reason == "\n".join(explain(plan, way.layers[0]))


def test_the_command_plans_the_same_again() -> None:
    plan = two_layer_plan()
    assert planning_command(plan) == "", "a model given in Python has no command"
    named = plan.model_copy(update={"model": plan.model.model_copy(update={"target": "zoo:gpt2,layers=2", "mode": "inference"})})
    named = named.model_copy(update={"pins": {"head.weight": "S0 R"}, "hardware": load_hardware("h200").to_dict()})
    words = shlex.split(planning_command(named))
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    assert words[:7] == ["autopar", "plan", "zoo:gpt2,layers=2", "--mesh", mesh, "--hardware", "h200"]
    options = dict(zip(words[7::2], words[8::2], strict=True))
    assert options["--mode"] == "inference" and options["--pin"] == "head.weight=S0 R"
    assert options["--memory"] == str(plan.memory_limit_bytes_per_rank)
    assert shlex.join(words) in html(named).replace("&#x27;", "'") and f"{datetime.now(UTC):%Y-%m-%d}" in html(named)
    broken = planning_command(named.model_copy(update={"hardware": {"name": "h200"}}))
    assert "--hardware h200.toml" in broken and "--memory" in broken, "hardware that cannot be read is none that is built in"
    usable = named.model_copy(update={"memory_limit_bytes_per_rank": load_hardware("h200").usable_bytes})
    assert "--memory" not in planning_command(usable)


def test_drawings_and_tables_are_reached_without_a_mouse() -> None:
    page = read_page(html(two_layer_plan()))
    found = {(tag, name): value for tag, name, value in page.attributes if tag in ("canvas", "main")}
    assert found["canvas", "role"] == "img" and found["canvas", "aria-label"]
    assert ("canvas", "tabindex", "0") in page.attributes and ("div", "tabindex", "0") in page.attributes
    assert len([row for row in page.attributes if row[:2] == ("canvas", "aria-label")]) == 3
    assert all(value for _, name, value in page.attributes if name == "aria-label")
    assert ("th", "scope", "col") in page.attributes and len([row for row in page.attributes if row[1] == "aria-live"]) == 3
    titles = page.texts["h2"]
    assert [value for tag, name, value in page.attributes if (tag, name) == ("section", "aria-label")] == titles


def test_what_a_notebook_shows_styles_itself_alone() -> None:
    part = two_layer_plan()._repr_html_()
    assert part == fragment(two_layer_plan()) and "<script" not in part and "<body" not in part
    style = re.sub(r"@media [^{]*\{(.*)\}", r"\1", "\n".join(read_page(part).texts["style"]))
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
    flights = SimulatedStep(plan).flights
    assert len(starts) == len(ends) == len(flights) > 0, "an arrow from each collective"
    spans = [event for event in events if event["ph"] == "X"]

    def at(event: dict[str, Any]) -> set[str]:
        """The bars within which an arrow ends."""
        return {bar["name"] for bar in spans if bar["tid"] == event["tid"] and bar["ts"] < event["ts"] < bar["ts"] + bar["dur"]}

    arrows = {(*at(starts[number]), *at(ends[number])) for number in starts}
    calls = {row.id: call_name(row) for row in plan.collectives}
    assert arrows == {(calls[name], flight.before or f"optimizer: {plan.model.optimizer}") for name, flight in flights.items()}
    assert events[0]["name"] == "process_name" and plan.model.target in events[0]["args"]["name"]
    last = max(timed.values(), key=lambda event: event["ts"] + event["dur"])
    assert last["name"] == f"optimizer: {plan.model.optimizer}"


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
    use = (
        "const group = document.querySelector('select[name=group]'), steps = document.querySelector('canvas.steps');"
        "group.value = 0; group.dispatchEvent(new Event('change'));"
        "steps.dispatchEvent(new KeyboardEvent('keydown', {key: '+'}));"
        "document.querySelector('button[name=way]').click();"
        "const plain = new WheelEvent('wheel', {deltaY: 9, cancelable: true}); steps.dispatchEvent(plain);"
        "const zoom = new WheelEvent('wheel', {deltaY: 9, ctrlKey: true, cancelable: true}); steps.dispatchEvent(zoom);"
        "const wheel = plain.defaultPrevented + ' ' + zoom.defaultPrevented;"
    )
    picked, mesh = "document.querySelector('.layer h3').textContent", "document.querySelector('canvas.mesh').height"
    said = f"' layer ' + {picked} + ' wheel ' + wheel + ' mesh ' + {mesh}"
    done = f"<script>{use} document.title = document.title + {said} + {over}</script></body>"
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
    assert title is not None and re.search(
        r" layer (\S+|outside the modules) wheel false true mesh [1-9]\d+ over by 0 drawn [1-9]\d+$", title[1]
    ), dumped[:500]
