"""nn.Module -> Graph. See ``capture``.

capturing          the stages in order
weights            fake tensors in place of the module's own
precision          computing in another dtype than the parameters
exported           torch.export's graph over named inputs
autograd_calls     what the model says to autograd in Python: functions, hooks, gradients
axis_groups        groups of ranks as models name them
regions            functions of a model that run on each rank's part
collectives        what collectives mean in a region
collective_calls   the model's calls of local_map and of collectives
calls              a call's tensors by name, its nesting as JSON
containers         arguments and results as nests of tensors, and the way back
known_values       conditions whose answer is known, though tensors are stand-ins
sets               sets in an order that does not depend on the hash seed
repeats            equal layers traced once
unrolling          the others, put back into the graph
rewrite            its operators in the dialect
moe_dispatch       rows sorted by expert, as rows dispatched to their experts
sorted_rows        how these are followed through a graph from the sort
finite_operators   operators that rows of zeros, with which these are filled up, may pass
blocks             weights that are several in one (queries, keys and values), held as such
cutting            what cuts a dim into its blocks
block_propagation  how operators carry blocks
known_graphs       exported programs that were traced before
joint              traced to one functional graph, forward and backward
lowering           that as Op and Tensor
naming             names of operators
roles              which of its inputs and outputs are what
same               nodes that only repeat a value
provenance         the module path and source line of a node
groups             equal layers
replaced_buffers   buffers in whose place a forward puts other tensors
buffer_in_place    what a call changes of a buffer, changed where it lies
dense_gradients    gradients that are views of less memory than their size, copied
microbatches       the call of one microbatch, and what their losses add up to
fixed_sizes        code with sizes that are known, in place of operators whose sizes depend on values
diagnosis          errors at the user's line
hidden_state       what forward keeps for its next call in attributes that are no buffers
iota_index         indices that count the rows of a dim
"""

from __future__ import annotations

from autopar.importer.axis_groups import axis_mesh
from autopar.importer.calls import named_tensors
from autopar.importer.capturing import Capture, capture, capture_graph, without_fast_path
from autopar.importer.collective_calls import on_one_device
from autopar.importer.microbatches import Captures, cut_call

__all__ = [
    "Capture", "Captures", "axis_mesh", "capture", "capture_graph", "cut_call", "named_tensors", "on_one_device", "without_fast_path",
]  # fmt: skip
