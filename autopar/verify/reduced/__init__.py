"""A plan verified whole at reduced sizes, all ranks in one process: for plans of more ranks and memory than there are at hand.

verifying   verify_reduced: the reduced schedule on simulated ranks, the reduced graph on one device, the comparison
pipelines   verify_pipeline_reduced: the same of each stage, equal ones once
layers      one of each kind of equal layers
shrinking   the schedule with every factor shrunk
extents     the number that each dim is divided by
relations   arguments and whole dims of operators, at other sizes
single      the reduced graph on one device
"""

from autopar.verify.reduced.pipelines import ReducedPipelineVerification, verify_pipeline_reduced
from autopar.verify.reduced.verifying import ReducedVerification, verify_reduced

__all__ = ["ReducedPipelineVerification", "ReducedVerification", "verify_pipeline_reduced", "verify_reduced"]
