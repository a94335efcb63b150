"""The loops over a list as arrays: all hot code of ``schedule``. They are plain Python that Cython compiles, see ``solvers.kernels``.

Each part of a collective has a *slot*, whether it is a call of its own or shares a bucket. The start of slot n has number 2n, its wait
2n + 1; all other instructions have the numbers behind those. The first slot of a bucket is its *head*: its start and wait are the call's.

views   the tables that a kernel is given, as typed buffers (``tables``)
clock   how long a list takes
memory  what it holds
moves   the local search
"""
