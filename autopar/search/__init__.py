"""Graph x rules x cost model -> the best schedule within the memory limit, with a proved bound on its step.

finding      the search, from a graph to what was found: baselines, folded layers first, the whole graph where it is not too large
single       one search on one model, from the plans it begins with
found        what it found, and what searches share
rounds       its rounds: solving, scheduling, learning, proving
trials       the best so far, one solve, one schedule
scarcity     where memory is short: answers made to fit
merging      meshes of many axes with neighbours as one, and back
near         the choices that differ from known plans in one axis
repeats      equal layers with everything in them
folding      equal layers: which, and a graph of four of them
folded       the problem of that graph, and a bound for layers left free
space        the choices and their prices
resharding   the prices of reshards between all pairs of specs at once
model        the integer problem: nodes, edges, weights
units        seconds as integers
solving      solves on the way to an answer
building     graph x choices -> that problem
lives        its memory items
again        its second runs: what backward makes again
beside       what only pairs of choices hold, as nodes between them
fitting      makes answers fit: what schedules hold beyond what the problem counts
alternatives other choices for one tensor or operator, and what they would add
alike        equal layers alike, where that costs next to nothing
entering     inputs split over the batch, where that costs nothing
exposure     prices by what operators waited for
bounds       weights whose optimum bounds every step
calls        what calls take beside what they send
counting     a bound that counts it
excluding    what plans of little time do without
renting      a bound where memory is short: what is held is paid for
pooled       a bound where memory is short: one rank with the memory of all
changes      changes of a plan, one thing at a time
moving       plans changed so, judged by their schedules; those that hold too much, until they fit
promise      what there is to be done for plans, which tells what change of one to try first, and what not again
regions      some operators of a plan chosen anew together
parting      plans that need too much memory, with a part of each tensor on a rank
keeping      plans that need too much memory, with less kept
extract      choices -> Assignment
tuning       the best schedule of an assignment
baselines    plans written by hand
walking      the walk over a graph that makes one
written      how a search schedules them
experts      what of a graph are a mixture's experts, for them
recompute    what they make again in backward where they do not fit
pins         what the user fixed
uneven       which dims may be split in unequal parts
lean         the least memory, when nothing fits
"""

from autopar.search.finding import find_plan
from autopar.search.found import Baseline, Found, Shared
from autopar.search.trials import PROOF, Progress

__all__ = ["PROOF", "Baseline", "Found", "Progress", "Shared", "find_plan"]
