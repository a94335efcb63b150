"""Schedule -> what each rank runs: instructions on local tensors, collectives, sharded weights, the module that trains.

The rooms, lowest first; lower ones never import higher ones.

ranks          how ranks hold and exchange tensors
    groups              the ranks behind a tuple of sub-axes
    placement           global tensors <-> parts, ShardingSpec <-> DTensor placements
    filling             unequal parts filled up for a collective
    backends            flat buffers between ranks: all ranks in one process, or this process as one rank
    lent_buffers        tensors lent to a backend's threads, given back before Python ends
    collectives         values into buffers, buffers into values
    offloading          copies to the host and back
    agreement           all ranks hold the same schedule and the same weights
instructions   how an instruction runs on a rank
    code                a segment as straight-line Python
    ranges              ranges for torch.profiler
    operators           operators by target
    kernels             one operator on one rank, as an expression of that code
    whole_operands      operators are told that a rank holds a whole table, or all experts
    index_check         numbers that are looked up must be of entries that are there
    mixed_norms         norms beside weights of more digits, for which a GPU has no kernel
    fusion              operators that run as one kernel, or write over what they read last
    gradient_pairs      both gradients of a convolution in one call
    means               means in one call
    buffer_writes       counters and running statistics are written where they lie
    local_steps         slices and masks of reshards
    inner, inner_calls  operators with collectives inside: their bodies, and the statement that runs them
    expert_exchange     those that send rows to the ranks of their experts
    kept_collectives    those that a model calls itself
    sequences           attention over a split sequence
weights        how weights lie on ranks and in files
    sharding            parameters and buffers as DTensors
    checkpoints         what a rank stores of a DTensor in blocks
optimizers     optimizers of sharded weights
    matrix_steps        matrices made orthogonal whole, for Muon, by the ranks that hold their parts
    host_optimizer      optimizers whose states lie on the host between steps
    master_weights      float32 master weights beside half-precision parameters
execution      how a schedule runs on a rank
    binding             instructions as statements of a segment's code
    executable          the segments, and how a step runs them
    loss_gradient       the gradient of the loss that a backward begins with
    loss_tail           what of forward only the loss asks for, which runs when it is read
    emission            the same instructions as torch.fx graphs
    replaying           segments recorded once and replayed: static memory, what is copied in and out, random draws
    cuda_graphs         the recorder of a GPU
    read_back           operators that a CUDA graph cannot hold
    footprint           the peak of memory as a schedule is run
steps          one step
    calls               a call's arguments and results
    saved_values        what a step keeps from forward for backward, taken once
    deferred_loss       the loss that is waited for when it is read
    step                how tensors of a call enter a program and leave it
    training_step       one step as one autograd function
    accumulation        a step of several microbatches
    simulation          steps of all ranks at once, in this process
programs       the programs of a module
    programs            one for each mode, shapes and settings that the module is called with
    padding             calls of any length, padded to planned ones
    rows                the rows of a batch that each rank passes
    settings            plain attributes of the model's modules, with which a program is made
    container_snapshot  what lists, dictionaries and plain objects hold, noted and compared
    parts               submodules of a compiled module
    forward_attributes  attributes in which forward leaves tensors: not to be read after a program
module         the nn.Module
    sharded_module      the module that trains
    held_weights        the weights that a call finds in it
    states              saving and loading
    data                what each rank loads
    compiling           plan -> module
pipelines      stages of a pipeline
    step                the stages' actions in one order
    mail                what crosses between stages on real ranks
    programs            programs of a pipeline's module
    module              the module of a rank's stages
exports        programs in a folder, run without the model's code
    exporting           the plan and each rank's shards, written
    loading             such a program run, of a pipeline too
"""

from autopar.runtime.exports.exporting import export_program, load_safetensors
from autopar.runtime.exports.loading import load_program
from autopar.runtime.module.compiling import compile_plan, compile_schedule
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.optimizers.host_optimizer import HostOptimizer
from autopar.runtime.optimizers.master_weights import MasterWeights
from autopar.runtime.ranks.placement import from_placements, to_placements
from autopar.runtime.steps.simulation import simulate

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
