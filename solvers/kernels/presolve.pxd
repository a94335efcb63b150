cimport cython
from libc.stdint cimport int64_t

from .tables cimport add_row, add_table, drop_forbidden, least_by_one, least_by_pair, size_of, step_across, step_along, tighten
from .views cimport Network

cdef int64_t BY_PAIR, CONSTANT, EDGE_HEAD, EDGE_TAIL, FIXED, FOLLOWS, INFEASIBLE, LOG, LOG_DATA, NEED, NODE_HEAD, NODE_TAIL, POOL, VISITED
cdef int64_t LOST_FIRST, LOST_SECOND, MOVED_FIRST, MOVED_SECOND, IS_ZERO, FIRST_FOLLOWS, SECOND_FOLLOWS

cdef void hang(Network net, int64_t end, int64_t node) noexcept nogil
cdef int64_t far(Network net, int64_t end) noexcept nogil
cdef void kill(Network net, int64_t e) noexcept nogil
cdef int64_t joining(Network net, int64_t v, int64_t w) noexcept nogil
cdef void wake_edge(Network net, int64_t e) noexcept nogil
cdef void wake_node(Network net, int64_t node) noexcept nogil
cdef void wake_around(Network net, int64_t node) noexcept nogil
cpdef void wake(Network net, const int64_t[::1] nodes, int64_t around) noexcept nogil
cpdef void link(Network net) noexcept nogil
cdef int64_t log_step(Network net, int64_t kind, int64_t node, int64_t first, int64_t second, int64_t room) noexcept nogil
cpdef bint run_queues(Network net, int64_t largest_table) noexcept nogil
cdef bint revise(Network net, int64_t e) noexcept nogil
cdef bint merge(Network net, int64_t e, int64_t u, int64_t v) noexcept nogil
cdef void move_edges(Network net, int64_t u, int64_t v, int64_t data) noexcept nogil
@cython.locals(along=int64_t, across=int64_t)
cdef void rehang(Network net, int64_t end, int64_t u, int64_t v, int64_t w, int64_t data) noexcept nogil
cdef bint simplify(Network net, int64_t i, int64_t largest_table) noexcept nogil
cdef void fix(Network net, int64_t i, int64_t k) noexcept nogil
cdef int64_t first_live(Network net, int64_t end) noexcept nogil
cdef bint eliminate_between(Network net, int64_t i, int64_t largest_table) noexcept nogil
