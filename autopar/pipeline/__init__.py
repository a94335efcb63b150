"""Pipelines: stages cut from the model's graph, planned each as a graph of its own, and the timetable in which they run.

cutting         the joint graph of one microbatch -> a graph for each stage, and what crosses between them
timetable       one total order of the stages' actions, its text, and what makes it legal
orders          the orders that a user may ask for
clock           seconds and bytes of a step, from each stage's schedule
layer_tables    seconds and bytes of each layer in a plan of the whole graph
equal_stages    the schedule of one stage as that of another of equal structure
crossing        layouts and prices of what crosses between stages; pins of a stage
baselines       pipelines by hand, to compare with
stage_searches  the searches for plans of stages, with their microbatches in flight
explanation     one thing in the stages that hold it, and why stages begin where they do
request         what is asked of a pipeline
result          a planned pipeline
planning        ``plan_pipeline``: a cut, a plan of each stage and a timetable, with a bound
"""

from autopar.pipeline.cutting import STAGE_AXIS, Boundary, Stages, cut_graph, find_units, stage_mesh
from autopar.pipeline.timetable import Action

__all__ = ["STAGE_AXIS", "Action", "Boundary", "Stages", "cut_graph", "find_units", "stage_mesh"]
