"""ShardingSpec -> ShardingSpec as steps: the one planner used for pricing and for emitted code.

face           ``autopar.reshard``: texts, read and checked
planning       specs -> the search's question; its answer -> steps
moves          what is asked of a search, its moves, its answer
trees          the cheapest ways from one layout to all others, where layouts can be listed
search         the cheapest way from one layout to another, where they are too many
ways           what the ways from one spec to many take, as arrays
letters, cuts  the parts of mesh axes that the search moves
permutation    which rank sends to which in a permute
steps          Step and Reshard, with their price
"""

from autopar.reshard.face import reshard
from autopar.reshard.planning import find_reshard, has_way
from autopar.reshard.steps import Reshard, Shapes, Step, copied_alone, cuts_inside, halfway, joins_inside
from autopar.reshard.ways import Asked, Calls, find_ways

__all__ = [
    "Asked", "Calls", "Reshard", "Shapes", "Step", "copied_alone", "cuts_inside", "find_reshard", "find_ways", "halfway",
    "has_way", "joins_inside", "reshard",
]  # fmt: skip
