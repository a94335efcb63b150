from libc.stdint cimport int64_t

from .views cimport Network

cdef int64_t CONSTANT, INFEASIBLE, NEVER, UPPER, VISITED
cdef int64_t LOST_FIRST, LOST_SECOND, MOVED_FIRST, MOVED_SECOND, IS_ZERO, FIRST_FOLLOWS, SECOND_FOLLOWS, MOVED, ALONE, FLAT

cdef int64_t plus(int64_t a, int64_t b) noexcept nogil
cpdef int64_t size_of(Network net, int64_t node) noexcept nogil
cpdef int64_t step_along(Network net, int64_t e, int64_t node) noexcept nogil
cpdef int64_t step_across(Network net, int64_t e, int64_t node) noexcept nogil
cpdef bint drop_forbidden(Network net, int64_t node) noexcept nogil
cpdef int64_t tighten(Network net, int64_t e) noexcept nogil
cdef void forbid_dear(Network net, int64_t e, int64_t u, int64_t v) noexcept nogil
cdef bint drop_unsupported(Network net, int64_t e, int64_t u, int64_t v) noexcept nogil
cdef int64_t take_minima(Network net, int64_t e, int64_t u, int64_t v) noexcept nogil
cpdef void add_table(
    Network net, int64_t to, int64_t along, int64_t across, int64_t e, int64_t u, int64_t v, int64_t w, int64_t data
) noexcept nogil
cpdef void add_row(Network net, int64_t e, int64_t i, int64_t k, int64_t w) noexcept nogil
cpdef void least_by_one(Network net, int64_t e, int64_t i, int64_t v, int64_t data) noexcept nogil
cpdef void least_by_pair(
    Network net, int64_t e, int64_t f, int64_t i, int64_t v, int64_t w, int64_t data, int64_t new, int64_t along, int64_t across
) noexcept nogil
