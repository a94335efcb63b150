"""From a model to plans within memory limits.

session        one captured model on its machines: microbatches, then meshes, then one search each, then the plan
capturing      the model's graphs, each captured when it is asked for
screening      meshes and numbers of microbatches, ranked by the best plan by hand on each
race           candidates that share the time, the best plan kept
cautions       warnings about a plan
memory_ladder  the least step under each of a ladder of memory limits
grid           plans over settings of the model, numbers of devices and memory limits
"""
