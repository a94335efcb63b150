"""ShardingSpec -> ShardingSpec as steps: the one planner used for pricing and for emitted code."""

from autopar.reshard.face import reshard
from autopar.reshard.planning import find_reshard
from autopar.reshard.steps import Reshard, Step

__all__ = ["Reshard", "Step", "find_reshard", "reshard"]
