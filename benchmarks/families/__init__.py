"""The models of ``benchmarks/models.py``: families of four libraries and of plain torch, small, from configurations.

A row names a family, its library, and a function of the mode that gives a ``Target``. In training a model returns its own loss where it
has one (``labels``), is given a usual one where that is how it is trained, and else its outputs' gradients are inputs of the plan.
Sizes are the least that keep a family's own structure: two layers, dims that four ranks divide.
"""

from __future__ import annotations

from benchmarks.families.diffusers import DIFFUSERS
from benchmarks.families.fields import FIELDS
from benchmarks.families.graphs import GRAPHS
from benchmarks.families.images import TIMM, TORCHVISION
from benchmarks.families.plain import TORCH
from benchmarks.families.row import Family
from benchmarks.families.sequences import SEQUENCES
from benchmarks.families.transformers import TRANSFORMERS
from benchmarks.families.vision import VISION

FAMILIES: tuple[Family, ...] = (*TRANSFORMERS, *TORCHVISION, *TIMM, *DIFFUSERS, *TORCH, *SEQUENCES, *VISION, *GRAPHS, *FIELDS)
