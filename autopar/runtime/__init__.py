"""Schedule -> what each rank runs: instructions on local tensors, collectives, sharded weights, the module that trains.

placement           global tensors <-> parts, ShardingSpec <-> DTensor placements
groups              the ranks behind a tuple of sub-axes
backends            flat buffers between ranks: all ranks in one process, or this process as one rank
lent_buffers        tensors lent to a backend's threads, given back before Python ends
collectives         values into buffers, buffers into values
agreement           all ranks hold the same schedule and the same weights
operators           operators by target
code                a segment as straight-line Python
kernels             one operator on one rank, as an expression of it
whole_operands      operators are told that a rank holds a whole table, or all experts
index_check         numbers that are looked up must be of entries that are there
mixed_norms         norms beside weights of more digits, for which a GPU has no kernel
fusion              operators that run as one kernel, or write over what they read last
gradient_pairs      both gradients of a convolution in one call
buffer_writes       counters and running statistics are written where they lie
inner               bodies of the operators with collectives inside
expert_exchange     those that send rows to the ranks of their experts
execution           instructions as statements of a segment's code
loss_gradient       the gradient of the loss that a backward begins with
loss_tail           what of forward only the loss asks for, which runs when it is read
deferred_loss       the loss that is waited for when it is read
emission            the same instructions as torch.fx graphs
replaying           segments recorded once and replayed: static memory, what is copied in and out, random draws
cuda_graphs         the recorder of a GPU
read_back           operators that a CUDA graph cannot hold
calls               a call's arguments and results
forward_attributes  attributes in which forward leaves tensors: not to be read after a program
weights             parameters and buffers as DTensors
held_weights        those that a call finds in the module
checkpoints         what a rank stores of a DTensor in blocks
saved_values        what a step keeps from forward for backward, taken once
steps               one step as one autograd function
accumulation        a step of several microbatches
footprint           the peak of memory as a schedule is run
padding             calls of any length, padded to planned ones
programs            a program for each mode, shapes and settings that a module is called with
settings            plain attributes of the model's modules, and what containers among them hold, with which a program is made
container_snapshot  what lists, dictionaries and plain objects hold, noted and compared
data                what each rank loads
module              the nn.Module
matrix_steps        matrices made orthogonal whole, for Muon, by the ranks that hold their parts
host_optimizer      optimizers whose states lie on the host between steps
optimizers          float32 master weights beside half-precision parameters
compiling           plan -> module
exporting           programs in a folder: the plan and each rank's shards
exported            such a program run, of a pipeline too
"""

from autopar.runtime.compiling import compile_plan, compile_schedule
from autopar.runtime.exported import load_program
from autopar.runtime.exporting import export_program, load_safetensors
from autopar.runtime.host_optimizer import HostOptimizer
from autopar.runtime.module import ShardedModule
from autopar.runtime.optimizers import MasterWeights
from autopar.runtime.placement import from_placements, to_placements
from autopar.runtime.simulation import simulate

__all__ = [
    "HostOptimizer",
    "MasterWeights",
    "ShardedModule",
    "compile_plan",
    "compile_schedule",
    "export_program",
    "from_placements",
    "load_program",
    "load_safetensors",
    "simulate",
    "to_placements",
]
