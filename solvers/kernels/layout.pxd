cimport cython
from libc.stdint cimport int64_t, uint8_t

from .tables cimport size_of
from .views cimport Graph, Network

cdef double FAR
cdef int64_t NEVER

@cython.locals(row=int64_t)
cpdef void compact_tables(Network net, const int64_t[::1] edges, int64_t[::1] costs) noexcept nogil
@cython.locals(cost=double)
cpdef void orient_tables(
    const int64_t[::1] node_ptr, const int64_t[::1] first, const int64_t[::1] second, const int64_t[::1] edge_ptr, const int64_t[::1] costs,
    double[::1] table, double[::1] turned
) noexcept nogil
cpdef void copy_open_entries(
    Graph graph, const uint8_t[::1] is_open, const double[::1] rise, double room, int64_t forbidden, int64_t[::1] costs
) noexcept nogil
