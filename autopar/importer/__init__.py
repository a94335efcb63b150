"""nn.Module -> Graph. See ``capture``.

``capturing`` has the stages in order, ``naming`` the names of operators. The rooms, lowest first; lower ones never import higher ones.

diagnosis    where a node comes from, and what to say of it
    fixed_sizes        code with sizes that are known, in place of operators whose sizes depend on values
    errors             errors at the user's line
    provenance         the module path and source line of a node
arguments    arguments and results
    containers         as nests of tensors, and the way back
    calls              a call's tensors by name, its nesting as JSON
rewrite      operators of torch in the dialect, a file for a family
stand_ins    the model run on stand-ins of its tensors
    fake_weights       fake tensors in place of the module's own
    known_values       conditions whose answer is known
    iota_index         indices that count the rows of a dim
    indexing           rows picked by values, constant masks
    autograd_calls     what the model says to autograd in Python: functions, hooks, gradients
    sets               sets in an order that does not depend on the hash seed
layers       equal layers
    equal_layers       found by module path, proved equal by their operators
    repeats            traced once
    unrolling          the others, put back into the graph
collectives  a model's own collectives
    axis_groups        groups of ranks as models name them
    regions            functions of a model that run on each rank's part
    meanings           what collectives mean in a region
    calls              the model's calls of local_map and of collectives
export       the model as torch.export sees it
    precision          computing in another dtype than the parameters
    hidden_state       what forward keeps for its next call in attributes that are no buffers
    replaced_buffers   buffers in whose place a forward puts other tensors
    exported           the graph over named inputs
blocks       weights that are several in one (queries, keys and values)
    cutting            what cuts a dim into its blocks
    propagation        how operators carry blocks
    in_blocks          which weights are held so
experts      mixtures of experts
    finite_operators   operators that rows of zeros, with which rows are filled up, may pass
    sorted_rows        rows sorted by expert, followed through a graph from the sort
    moe_dispatch       these as rows dispatched to their experts
trace        one functional graph
    in_place           memory that the model writes in place
    known_graphs       exported programs that were traced before
    joint              forward and backward traced
    roles              which of the graph's inputs and outputs are what
    same               nodes that only repeat a value
    lowering           the graph as Op and Tensor
passes       changes of a Graph
    buffer_in_place    what a call changes of a buffer, changed where it lies
    dense_gradients    gradients that are views of less memory than their size, copied
    microbatches       the call of one microbatch, and what its losses add up to
"""

from __future__ import annotations

from autopar.importer.arguments.calls import named_tensors
from autopar.importer.capturing import Capture, capture, capture_graph, without_fast_path
from autopar.importer.collectives.axis_groups import axis_mesh
from autopar.importer.collectives.calls import on_one_device
from autopar.importer.passes.microbatches import Captures, cut_call

__all__ = [
    "Capture", "Captures", "axis_mesh", "capture", "capture_graph", "cut_call", "named_tensors", "on_one_device", "without_fast_path",
]  # fmt: skip
