"""Seconds and bytes of operators, collectives and the optimizer on a described machine. Pure functions; no torch."""

from cost_models.collectives import Group
from cost_models.errors import CostModelError, HardwareFileError, MeshError, UnknownHardwareError
from cost_models.hardware import Hardware, Link, hardware_names, load_hardware
from cost_models.machine import COST_MODELS, CostModel, Machine
from cost_models.memory import OPTIMIZERS, optimizer_bytes, optimizer_seconds
from cost_models.mesh import Mesh, SubAxis

__all__ = [
    "COST_MODELS",
    "OPTIMIZERS",
    "CostModel",
    "CostModelError",
    "Group",
    "Hardware",
    "HardwareFileError",
    "Link",
    "Machine",
    "Mesh",
    "MeshError",
    "SubAxis",
    "UnknownHardwareError",
    "hardware_names",
    "load_hardware",
    "optimizer_bytes",
    "optimizer_seconds",
]
