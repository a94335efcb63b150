cimport cython
from libc.stdint cimport int64_t, uint8_t

from solvers.kernels.views cimport Network

cdef int64_t BY_PAIR, CONSTANT, EDGE_HEAD, EDGE_TAIL, FIXED, FOLLOWS, INFEASIBLE, LOG, LOG_DATA, NEED, NEVER, NODE_HEAD, NODE_TAIL, POOL
cdef int64_t UPPER, VISITED, LOST_FIRST, LOST_SECOND, MOVED_FIRST, MOVED_SECOND, IS_ZERO, FIRST_FOLLOWS, SECOND_FOLLOWS

cdef int64_t plus(int64_t a, int64_t b) noexcept nogil
cdef void hang(Network net, int64_t end, int64_t node) noexcept nogil
cdef int64_t far(Network net, int64_t end) noexcept nogil
cdef int64_t size_of(Network net, int64_t node) noexcept nogil
cdef void kill(Network net, int64_t e) noexcept nogil
cdef int64_t joining(Network net, int64_t v, int64_t w) noexcept nogil
cdef void wake_edge(Network net, int64_t e) noexcept nogil
cdef void wake_node(Network net, int64_t node) noexcept nogil
cdef void wake_around(Network net, int64_t node) noexcept nogil
cpdef void wake(Network net, const int64_t[::1] nodes, int64_t around) noexcept nogil
cpdef void link(Network net) noexcept nogil
cdef int64_t log_step(Network net, int64_t kind, int64_t node, int64_t first, int64_t second, int64_t room) noexcept nogil
@cython.locals(at=int64_t)
cpdef void replay(Network net, int64_t[::1] choices) noexcept nogil
@cython.locals(used=int64_t, fill=bint)
cpdef int64_t trace(Network net, int64_t first_log, int64_t[::1] root, int64_t[::1] map_at, int64_t[::1] maps) noexcept nogil
cpdef void maximal_times(
    const uint8_t[::1] binding, const int64_t[::1] capacity, const int64_t[::1] begins, const int64_t[::1] ends, uint8_t[::1] kept
) noexcept nogil
cdef int64_t step_along(Network net, int64_t e, int64_t node) noexcept nogil
cdef int64_t step_across(Network net, int64_t e, int64_t node) noexcept nogil
cdef bint drop_forbidden(Network net, int64_t node) noexcept nogil
cdef int64_t tighten(Network net, int64_t e) noexcept nogil
cdef void add_table(Network net, int64_t target, int64_t source, int64_t first, int64_t second) noexcept nogil
cdef void follow(Network net, int64_t e, int64_t u, int64_t v, int64_t data) noexcept nogil
cdef void add_followed(Network net, int64_t target, int64_t source, int64_t u, int64_t v, int64_t w, int64_t data) noexcept nogil
cdef void copy_followed(Network net, int64_t e, int64_t u, int64_t v, int64_t w, int64_t data, int64_t new) noexcept nogil
cdef void add_row(Network net, int64_t e, int64_t i, int64_t k, int64_t w) noexcept nogil
cdef void least_by_one(Network net, int64_t e, int64_t i, int64_t v, int64_t data) noexcept nogil
cdef void least_by_pair(Network net, int64_t e, int64_t f, int64_t i, int64_t v, int64_t w, int64_t data, int64_t new) noexcept nogil
cdef void transpose(Network net, int64_t e, int64_t v, int64_t w, int64_t new) noexcept nogil
cpdef void copy_tables(Network net, const int64_t[::1] edges, const int64_t[::1] edge_ptr, int64_t[::1] tables) noexcept nogil
cpdef bint run_queues(Network net, int64_t largest_table) noexcept nogil
cdef bint revise(Network net, int64_t e) noexcept nogil
cdef bint merge(Network net, int64_t e, int64_t u, int64_t v) noexcept nogil
cdef void move_edges(Network net, int64_t u, int64_t v, int64_t data) noexcept nogil
cdef void rehang(Network net, int64_t end, int64_t u, int64_t v, int64_t w, int64_t data) noexcept nogil
cdef bint simplify(Network net, int64_t i, int64_t largest_table) noexcept nogil
cdef void fix(Network net, int64_t i, int64_t k) noexcept nogil
cdef int64_t first_live(Network net, int64_t end) noexcept nogil
cdef bint eliminate_leaf(Network net, int64_t i) noexcept nogil
cdef bint eliminate_between(Network net, int64_t i, int64_t largest_table) noexcept nogil
