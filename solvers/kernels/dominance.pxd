cimport cython
from libc.stdint cimport int64_t, uint8_t

from solvers.kernels.views cimport Items, Network

cdef int64_t NEVER, VISITED, AT, STEP, ACROSS, FROM, COUNT, SIDE

@cython.locals(gone=bint)
cdef bint thin(Network net, Items items, int64_t i, int64_t[::1] sides, int64_t[::1] columns) noexcept nogil
cdef int64_t cheapest(Network net, int64_t[::1] sides, int64_t edges, int64_t b, int64_t[::1] columns) noexcept nogil
cdef bint hopeful(Network net, int64_t[::1] columns, int64_t found, int64_t a, int64_t saved) noexcept nogil
cdef bint better(Network net, int64_t[::1] sides, int64_t edges, int64_t a, int64_t b, int64_t saved) noexcept nogil
cdef bint within(Items items, int64_t a, int64_t b) noexcept nogil
cpdef void dominate(
    Network net, Items items, const int64_t[::1] nodes, const uint8_t[::1] waiting, uint8_t[::1] lost, int64_t[::1] sides, int64_t[::1] columns
) noexcept nogil
