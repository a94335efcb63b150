"""The loops over a list as arrays: all hot code of ``schedule``. They are plain Python that Cython compiles, see ``solvers.kernels``.

views   the tables that a kernel is given, as typed buffers (``tables``)
clock   how long a list takes
memory  what it holds
moves   the local search
"""
