"""Seconds and bytes of operators, collectives and the optimizer on a described machine. Pure functions; no torch."""

from .collectives import Group
from .efficiency import Efficiency, Residual
from .errors import CostModelError, HardwareFileError, MeshError, UnknownHardwareError, UnknownOptimizerError
from .execution import EXECUTIONS, Execution
from .hardware import Hardware, hardware_names, hardware_text, load_hardware
from .links import Figures, Link
from .machine import Machine
from .memory import OPTIMIZERS, UNLIMITED, Optimizer, find_optimizer, optimizer_bytes
from .mesh import Mesh, SubAxis
from .model import CostModel
from .operator import Operator
from .registry import COST_MODELS

__all__ = [
    "COST_MODELS",
    "EXECUTIONS",
    "OPTIMIZERS",
    "UNLIMITED",
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
