"""verify: a plan's sharded program on N ranks against the single-device model.

Outputs, every gradient, ten AdamW steps, the collectives executed against those planned, and memory measured against predicted.

verifying      verify: both runs, then the comparison
reduced        verify_reduced: a step of all ranks in one process at reduced sizes, for plans of more ranks than there are; of a pipeline
               each stage (verify_pipeline_reduced)
pipelines      verify_pipeline: the same of a pipeline, on real ranks
comparison     errors and their tolerances; the Verification
trials         the same steps on the plain model, on ranks, and on simulated ranks
chance         what a model draws made constant, on one device as on ranks
trainers       the optimizers that plans name, as users run them
widened        the same trial in float64, to tell rounding from error
launch         ranks as forked processes of this machine
examples       values for weights and inputs that have none
live_memory    bytes of live tensors, operator by operator
"""

from autopar.verify.comparison import Verification
from autopar.verify.pipelines import PipelineVerification, verify_pipeline
from autopar.verify.reduced import ReducedPipelineVerification, ReducedVerification, verify_pipeline_reduced, verify_reduced
from autopar.verify.verifying import verify

__all__ = [
    "PipelineVerification", "ReducedPipelineVerification", "ReducedVerification", "Verification", "verify", "verify_pipeline",
    "verify_pipeline_reduced", "verify_reduced",
]  # fmt: skip
