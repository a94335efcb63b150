cimport cython
from libc.stdint cimport int64_t

from .views cimport Graph

cdef double FAR

cdef double smallest(double[::1] values, int64_t count) noexcept nogil
cdef int64_t collect(Graph graph, const double[::1] theta, const double[::1] messages, int64_t i) noexcept nogil
cdef double send(
    const double[::1] belief, int64_t size, double[::1] messages, int64_t back, double share, const double[::1] table, int64_t at, int64_t out, int64_t columns
) noexcept nogil
@cython.locals(forward=bint)
cpdef double pass_both(Graph graph, const double[::1] theta, double[::1] messages, int64_t[::1] choices) noexcept nogil
cdef int64_t decode(Graph graph, const double[::1] messages, const int64_t[::1] choices, int64_t i, int64_t size) noexcept nogil
cpdef double certify(Graph graph, const double[::1] theta, const double[::1] messages) noexcept nogil
cpdef void gather_beliefs(Graph graph, const double[::1] theta, const double[::1] messages, double[::1] over) noexcept nogil
cpdef void extrapolate(double[::1] messages, double[::1] previous, double share) noexcept nogil
cpdef void fill_reduced_costs(
    Graph graph, const double[::1] theta, const double[::1] messages, double[::1] choice, double[::1] pair
) noexcept nogil
