"""nn.Module -> Graph. See ``capture``.

capturing      the stages in order
weights        fake tensors in place of the module's own
precision      computing in another dtype than the parameters
exported       torch.export's graph over named inputs
deferred       what the model says to autograd in Python: functions, hooks, gradients
rewrite        its operators in the dialect
joint          traced to one functional graph, forward and backward
lowering       that as Op and Tensor
provenance     the module path and source line of a node
groups         equal layers
diagnosis      errors at the user's line
"""

from __future__ import annotations

from autopar.importer.capturing import Capture, capture, capture_graph

__all__ = ["Capture", "capture", "capture_graph"]
