"""Seconds and bytes of operators, collectives and the optimizer on a described machine. Pure functions; no torch."""

from cost_models.collectives import Group
from cost_models.efficiency import Efficiency, Residual
from cost_models.errors import CostModelError, HardwareFileError, MeshError, UnknownHardwareError, UnknownOptimizerError
from cost_models.execution import EXECUTIONS, Execution
from cost_models.hardware import Hardware, hardware_names, hardware_text, load_hardware
from cost_models.links import Figures, Link
from cost_models.machine import Machine
from cost_models.memory import OPTIMIZERS, Optimizer, find_optimizer, optimizer_bytes
from cost_models.mesh import Mesh, SubAxis
from cost_models.model import CostModel
from cost_models.operator import Operator
from cost_models.registry import COST_MODELS

__all__ = [
    "COST_MODELS",
    "EXECUTIONS",
    "OPTIMIZERS",
    "CostModel",
    "CostModelError",
    "Efficiency",
    "Execution",
    "Figures",
    "Group",
    "Hardware",
    "HardwareFileError",
    "Link",
    "Machine",
    "Mesh",
    "MeshError",
    "Operator",
    "Optimizer",
    "Residual",
    "SubAxis",
    "UnknownHardwareError",
    "UnknownOptimizerError",
    "find_optimizer",
    "hardware_names",
    "hardware_text",
    "load_hardware",
    "optimizer_bytes",
]
