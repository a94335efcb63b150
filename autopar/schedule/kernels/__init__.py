"""The loops over a list as arrays: all hot code of ``schedule``.

They are plain Python that Cython compiles, see ``autopar.solvers.kernels``.

Each part of a collective has a *slot*, whether it is a call of its own or shares a bucket. The start of slot n has number 2n, its wait
2n + 1; all other instructions have the numbers behind those. The first slot of a bucket is its *head*: its start and wait are the call's.

views   the tables (``tables``) as typed buffers
clock   seconds of a list
memory  its peak bytes
moves   the local search
"""
