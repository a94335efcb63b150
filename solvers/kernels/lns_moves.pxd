from libc.stdint cimport int64_t

from .views cimport Graph, Items, Workspace

cpdef int64_t group_changes(
    Graph graph, const double[::1] theta, const double[::1] costs, const int64_t[::1] choices, const int64_t[::1] proposal, double[::1] priced,
    double[::1] true, Workspace work
) noexcept nogil
cdef double edge_change(Graph graph, const int64_t[::1] choices, const int64_t[::1] proposal, int64_t i, Workspace work) noexcept nogil
cpdef void accept_groups(
    Graph graph, Items items, const int64_t[::1] order, int64_t[::1] choices, const int64_t[::1] proposal, int64_t[::1] used,
    int64_t[::1] change, int64_t[::1] stops, Workspace work
) noexcept nogil
