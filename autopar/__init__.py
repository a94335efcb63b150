"""autopar: a PyTorch model, example inputs and a device mesh -> Plan -> the same model, sharded, on N ranks.

Public names resolve on first use, so that ``import autopar`` and ``autopar --help`` load neither torch nor a solver.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar.display import set_views
from autopar.version import __version__ as __version__

if TYPE_CHECKING:
    from autopar.api import capture, compile, compile_pipeline, load, load_pipeline, pareto, plan, plan_pipeline, sweep, tune
    from autopar.check import check
    from autopar.cost_models import Hardware, Mesh
    from autopar.errors import AutoparError
    from autopar.graph import Graph
    from autopar.importer import axis_mesh, on_one_device
    from autopar.padded import compile_padded, load_padded, plan_padded
    from autopar.pipeline_plan import PipelinePlan
    from autopar.placements import same_sharding, shard
    from autopar.plan import Plan
    from autopar.reshard import reshard
    from autopar.rules.own import rule
    from autopar.runtime import HostOptimizer, load_program
    from autopar.serving import load_serving, plan_serving, serve
    from autopar.serving.cached import cached
    from autopar.sharding import ShardingSpec
    from autopar.verify import verify

__all__ = [
    "AutoparError", "Graph", "Hardware", "HostOptimizer", "Mesh", "PipelinePlan", "Plan", "ShardingSpec", "axis_mesh", "cached",
    "capture", "check", "compile", "compile_padded", "compile_pipeline", "load", "load_padded", "load_pipeline", "load_program",
    "load_serving", "on_one_device", "pareto", "plan", "plan_padded", "plan_pipeline", "plan_serving", "reshard", "rule", "same_sharding",
    "serve", "shard", "sweep", "tune", "verify",
]  # fmt: skip

_HOME = {
    "AutoparError": "autopar.errors",
    "Graph": "autopar.graph",
    "Hardware": "autopar.cost_models",
    "HostOptimizer": "autopar.runtime",
    "Mesh": "autopar.cost_models",
    "PipelinePlan": "autopar.pipeline_plan",
    "Plan": "autopar.plan",
    "ShardingSpec": "autopar.sharding",
    "axis_mesh": "autopar.importer",
    "cached": "autopar.serving",
    "capture": "autopar.api",
    "check": "autopar.check",
    "compile": "autopar.api",
    "compile_padded": "autopar.padded",
    "compile_pipeline": "autopar.api",
    "load": "autopar.api",
    "load_padded": "autopar.padded",
    "load_pipeline": "autopar.api",
    "load_program": "autopar.runtime",
    "load_serving": "autopar.serving",
    "on_one_device": "autopar.importer",
    "pareto": "autopar.api",
    "plan": "autopar.api",
    "plan_padded": "autopar.padded",
    "plan_pipeline": "autopar.api",
    "plan_serving": "autopar.serving",
    "reshard": "autopar.reshard",
    "rule": "autopar.rules.own",
    "same_sharding": "autopar.placements",
    "serve": "autopar.serving",
    "shard": "autopar.placements",
    "sweep": "autopar.api",
    "tune": "autopar.api",
    "verify": "autopar.verify",
}


set_views({
    "PipelinePlan.__str__": "autopar.report.pipeline.pipeline_summary",
    "Plan.__str__": "autopar.report.summary",
    "Plan._repr_html_": "autopar.report.fragment",
    "Pareto.__str__": "autopar.report.frontier.frontier",
    "Pareto._repr_html_": "autopar.report.frontier.frontier_html",
    "Sweep.__str__": "autopar.report.curve.text",
    "Sweep.to_csv": "autopar.report.curve.csv_table",
    "Sweep.to_svg": "autopar.report.curve.drawing",
})  # fmt: skip


class _Package(ModuleType):
    """Keeps the public functions that share a submodule's name: importing ``autopar.plan`` does not hide ``autopar.plan(...)``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
