"""The command that plans the same model in the same way, as far as a plan's file says how it was made."""

from __future__ import annotations

import shlex

from autopar.cost_models import CostModelError, Hardware, hardware_names, load_hardware
from autopar.effort import DEFAULT_EFFORT
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan


def unsaid(plan: Plan | PipelinePlan) -> str:
    """The options that a plan's file does not hold."""
    effort = "" if isinstance(plan, Plan) and plan.search is not None else "effort, "
    return f"precision, recomputation, {effort}seed and time limit are not in the file"


def planning_command(plan: Plan | PipelinePlan) -> str:
    """``autopar plan ...``; empty where the model was given in Python. Hardware that is not built in stands as ``NAME.toml``."""
    if ":" not in plan.model.target:
        return ""
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    name, hardware = str(plan.hardware.get("name")), _read(plan)
    built_in = name in hardware_names() and load_hardware(name) == hardware
    words = ["autopar", "plan", plan.model.target, "--mesh", mesh, "--hardware", name if built_in else f"{name}.toml"]
    defaults = {"--mode": "train", "--optimizer": "adamw", "--cost-model": "roofline", "--microbatches": "1", "--effort": DEFAULT_EFFORT}
    asked = {
        "--mode": plan.model.mode, "--optimizer": plan.model.optimizer, "--cost-model": plan.created_by.cost_model,
        "--microbatches": str(plan.microbatches),
    }  # fmt: skip
    if isinstance(plan, Plan) and plan.search is not None:
        asked["--effort"] = plan.search.effort
    for option, value in asked.items():
        words += [option, value] if value != defaults[option] else []
    if plan.created_by.execution is not None:
        words += ["--execute", plan.created_by.execution]
    if plan.model.inputs is not None:
        words += ["--inputs", plan.model.inputs]
    if hardware is None or plan.memory_limit_bytes_per_rank != hardware.usable_bytes:
        words += ["--memory", str(plan.memory_limit_bytes_per_rank)]
    for name, spec in plan.pins.items():
        words += ["--pin", f"{name}={spec}"]
    return shlex.join(words)


def _read(plan: Plan | PipelinePlan) -> Hardware | None:
    try:
        return Hardware.from_dict(plan.hardware, "the plan's hardware")
    except CostModelError:
        return None
