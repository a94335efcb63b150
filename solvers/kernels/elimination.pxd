cimport cython
from libc.stdint cimport int64_t, uint8_t

from .views cimport Graph, Workspace

cdef int64_t ACTIVE, GONE, HELD, MEMBERS, FACTORS

cpdef void sweep(Graph graph, const double[::1] theta, int64_t[::1] choices, int64_t count, Workspace work) noexcept nogil
cpdef int64_t plan_order(
    Graph graph, const uint8_t[::1] held, const double[::1] jitter, const double[::1] points, double largest, int64_t room, Workspace work
) noexcept nogil
cdef int64_t push(Workspace work, int64_t waiting, double key, int64_t node) noexcept nogil
cdef int64_t pop(Workspace work, int64_t waiting) noexcept nogil
cdef double weight(Graph graph, int64_t i, Workspace work) noexcept nogil
cdef double log2(double value) noexcept nogil
cdef int64_t draw(int64_t i, double point, Workspace work) noexcept nogil
cdef void forget(int64_t j, int64_t i, Workspace work) noexcept nogil
cdef void meet(int64_t one, int64_t other, Workspace work) noexcept nogil
@cython.locals(lower=bint)
cdef void fill_tables(Graph graph, const double[::1] theta, const int64_t[::1] choices, int64_t count, Workspace work) noexcept nogil
cdef bint take_table(Graph graph, int64_t c, int64_t rank, int64_t factor, Workspace work) noexcept nogil
cdef int64_t sort_scope(Graph graph, int64_t turn, Workspace work) noexcept nogil
@cython.locals(at=int64_t, out=int64_t, least=double, choice=int64_t)
cdef void minimise(Graph graph, int64_t size, int64_t rank, int64_t factors, int64_t used, Workspace work) noexcept nogil
