"""The only package that touches private torch names. Each is named once, with what it is for.

A torch release that moves one of them breaks ``tests/test_torch_compat.py`` by name, not a user's capture. Imports of private names are
inside the functions, so that importing this package costs only torch itself.

total_norms     the norm that gradients are clipped by, over the stages of a pipeline
versions        the versions of torch that autopar was tested with
tensors         fake tensors, trees of arguments, tensors of one's own, and what an operator's schema says
tracing         joint traces of forward and backward, where their operators come from, and what stands in for operators
attention       the kernel of attention that torch would run on a GPU
autograd        calls of autograd and its transforms that a model makes itself, and the backward pass that runs
modules         modules: their hooks, their forward, and conversions that must not change them while they are captured
process_groups  process groups: what a model asks of them while it is captured, and collectives under the names of each version
rank_levels     levels of vmap as axes of ranks
rerouted        functions of torch that run ours instead, under every name
placements      placements of DTensors: strided shards, blocks and unequal parts in redistributions, checkpoints and ``fully_shard``
whole_tensors   operators of DTensors that are done with whole tensors, on all ranks alike
local_steps     optimizers step the part that a rank holds
written_parts   writes to DTensors and to views of them reach the part that a rank holds
dtensor_rules   rules of operators in place of those that DTensor has not, or has wrong
dtensors        what DTensor is taught before weights, gradients and outputs are handed out as such
"""

from autopar.torch_compat.attention import choose_attention
from autopar.torch_compat.autograd import (
    NOBODYS,
    accumulating,
    apply_alone,
    computes_again,
    is_reentrant_checkpoint,
    keeps_autograd_graph,
    noticed_questions,
    profiler_records,
    replaced_function_apply,
    replaced_transforms,
    store_gradients,
    traced_apart,
    with_backward,
    without_checkpoints,
)
from autopar.torch_compat.dtensor_rules import (
    ALIKE_FOR_PARTS,
    LINEAR,
    PRODUCTS,
    REGROUPING,
    by_formula,
    choose_rules,
    convolve_in_whole,
    format_numbers,
    make_orthogonal,
    means_over_parts,
    must_be_reduced,
    pair_complex,
    reduce_beside_numbers,
    reduce_looked_up,
    reduce_odd_parts,
    reduce_parameters,
    reduce_where_asked,
    take_plain_in_backward,
)
from autopar.torch_compat.dtensors import teach_dtensors
from autopar.torch_compat.local_steps import step_local_parts, step_whole_matrices
from autopar.torch_compat.modules import CALL_HOOKS, STATE_HOOKS, forward_of, hooks_of_copy, kept_modules, replaced_module_hooks, uncompiled
from autopar.torch_compat.placements import (
    Chunk,
    PartOf,
    WithinReplicas,
    checkpoint_in_chunks,
    dtensor_like,
    dtensors_like,
    gather_unequal_parts,
    has_blocks,
    has_unequal_parts,
    lay_by_parts,
    lie_as_before,
    local_of,
    mixes_dtensors,
    place_states,
    refuse_several_parts,
    shard_beside_blocks,
    spec_of,
    split_factor_of,
    strided_shard,
)
from autopar.torch_compat.process_groups import (
    all_gather_single,
    answered_as_one_device,
    collective_modules,
    flatten_axes,
    functional_collectives,
    local_map_function,
    new_group,
    process_group_named,
    reduce_scatter_single,
    refused_collectives,
    refused_ranks,
    store_of_world,
    timeout_of,
)
from autopar.torch_compat.rank_levels import beneath_levels, met_functions, rank_level, with_level, without_levels
from autopar.torch_compat.rerouted import rerouted
from autopar.torch_compat.tensors import (
    NO_TORCH_FUNCTION,
    adaptive_result,
    add_to_each,
    assert_later,
    called_by,
    children_of,
    copy_each,
    dispatch_mode,
    draws,
    fake_mode,
    flatten_with_paths,
    is_assertion,
    is_fake,
    is_known_container,
    is_operator,
    leaves_of,
    map_only,
    map_tensors,
    named_children_of,
    runs_a_graph,
    schema_of,
    shares_memory,
    storage_key,
    sums_with,
    transforms_run,
    unflatten,
    unknown_sizes,
    values_of,
    versions_of,
    wrapper_of,
)
from autopar.torch_compat.total_norms import join_total_norms
from autopar.torch_compat.tracing import (
    ORIGIN,
    answered_as_not_exported,
    autocast_on_cpu,
    bare_graphs,
    origin_of,
    real_tensors,
    recorded_origins,
    replaced_on_cpu,
    replaced_operators,
    role,
    trace_joint,
    trace_operators,
    traced_as,
    traced_in_backward,
)
from autopar.torch_compat.versions import TESTED, UntestedTorchWarning, check_tested
from autopar.torch_compat.whole_tensors import (
    argument_of,
    as_torch_does,
    before,
    cut_into,
    in_whole,
    is_view,
    on_all,
    reduce_partial,
    whole_of,
)
from autopar.torch_compat.written_parts import (
    assign_data,
    detach_local_parts,
    reshape_in_place,
    write_through_views,
    write_where_masked,
)

__all__ = [
    "ALIKE_FOR_PARTS", "CALL_HOOKS", "LINEAR", "NOBODYS", "NO_TORCH_FUNCTION", "ORIGIN", "PRODUCTS", "REGROUPING", "STATE_HOOKS", "TESTED",
    "Chunk", "PartOf", "UntestedTorchWarning", "WithinReplicas", "accumulating", "adaptive_result", "add_to_each",
    "all_gather_single", "answered_as_not_exported", "answered_as_one_device", "apply_alone", "argument_of", "as_torch_does",
    "assert_later", "assign_data", "autocast_on_cpu", "bare_graphs", "before", "beneath_levels", "by_formula", "called_by", "check_tested",
    "checkpoint_in_chunks", "children_of", "choose_attention", "choose_rules", "collective_modules", "computes_again",
    "convolve_in_whole", "copy_each", "cut_into", "detach_local_parts", "dispatch_mode", "draws", "dtensor_like", "dtensors_like",
    "fake_mode", "flatten_axes", "flatten_with_paths", "format_numbers", "forward_of", "functional_collectives", "gather_unequal_parts",
    "has_blocks", "has_unequal_parts", "hooks_of_copy", "in_whole", "is_assertion", "is_fake",
    "is_known_container", "is_operator", "is_reentrant_checkpoint", "is_view", "join_total_norms", "keeps_autograd_graph",
    "kept_modules", "lay_by_parts", "leaves_of", "lie_as_before", "local_map_function", "local_of", "make_orthogonal", "map_only",
    "map_tensors", "means_over_parts", "met_functions", "mixes_dtensors", "must_be_reduced", "named_children_of", "new_group",
    "noticed_questions", "on_all",
    "origin_of", "pair_complex", "place_states", "process_group_named", "profiler_records", "rank_level", "real_tensors",
    "recorded_origins", "reduce_beside_numbers", "reduce_looked_up", "reduce_odd_parts", "reduce_parameters", "reduce_partial",
    "reduce_scatter_single", "reduce_where_asked", "refuse_several_parts", "refused_collectives", "refused_ranks",
    "replaced_function_apply", "replaced_module_hooks", "replaced_on_cpu", "replaced_operators", "replaced_transforms", "rerouted",
    "reshape_in_place", "role", "runs_a_graph", "schema_of", "shard_beside_blocks", "shares_memory", "spec_of", "split_factor_of",
    "step_local_parts", "step_whole_matrices", "storage_key", "store_gradients", "store_of_world", "strided_shard", "sums_with",
    "take_plain_in_backward", "teach_dtensors", "timeout_of", "trace_joint", "trace_operators", "traced_apart", "traced_as",
    "traced_in_backward", "transforms_run", "uncompiled", "unflatten", "unknown_sizes", "values_of", "versions_of", "whole_of",
    "with_backward", "with_level", "without_checkpoints", "without_levels", "wrapper_of", "write_through_views", "write_where_masked",
]  # fmt: skip
