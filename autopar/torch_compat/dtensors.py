"""What DTensor is taught before weights, gradients and outputs are handed out as such."""

from __future__ import annotations

from autopar.torch_compat.dtensor_rules import (
    choose_rules,
    convolve_in_whole,
    detach_in_place,
    format_numbers,
    keep_numbers_plain,
    make_orthogonal,
    pair_complex,
    reduce_beside_numbers,
    reduce_looked_up,
    reduce_odd_parts,
    reduce_parameters,
    reduce_where_asked,
    say_how_to_compare,
    take_plain_in_backward,
)
from autopar.torch_compat.local_steps import step_local_parts
from autopar.torch_compat.placements import gather_unequal_parts, place_states, shard_beside_blocks
from autopar.torch_compat.written_parts import (
    assign_data,
    detach_local_parts,
    reshape_in_place,
    write_through_views,
    write_where_masked,
)


def teach_dtensors() -> None:
    """What DTensors of weights and gradients are to do beside what torch's do."""
    step_local_parts()
    detach_local_parts()
    reduce_where_asked()
    reduce_beside_numbers()
    keep_numbers_plain()
    reduce_parameters()
    write_where_masked()
    write_through_views()
    pair_complex()
    reduce_odd_parts()
    detach_in_place()
    choose_rules()
    assign_data()
    place_states()
    format_numbers()
    make_orthogonal()
    gather_unequal_parts()
    take_plain_in_backward()
    say_how_to_compare()
    reduce_looked_up()
    convolve_in_whole()
    reshape_in_place()
    shard_beside_blocks()
