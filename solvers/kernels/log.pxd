cimport cython
from libc.stdint cimport int64_t, uint8_t

from .views cimport Network

cdef int64_t BY_PAIR, FIXED, FOLLOWS, LOG

@cython.locals(at=int64_t)
cpdef void replay(Network net, int64_t[::1] choices) noexcept nogil
@cython.locals(used=int64_t)
cpdef void trace(Network net, int64_t first_log, int64_t[::1] root, int64_t[::1] map_at, int64_t[::1] maps) noexcept nogil
cpdef void maximal_times(
    const uint8_t[::1] binding, const int64_t[::1] capacity, const int64_t[::1] begins, const int64_t[::1] ends, uint8_t[::1] kept
) noexcept nogil
