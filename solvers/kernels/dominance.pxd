cimport cython
from libc.stdint cimport int64_t, uint8_t

from .tables cimport step_across, step_along
from .views cimport Items, Network

cdef int64_t NEVER, VISITED

cpdef void dominate(Network net, Items items, const int64_t[::1] nodes, uint8_t[::1] lost) noexcept nogil
@cython.locals(gone=bint)
cdef bint thin(Network net, Items items, int64_t i) noexcept nogil
@cython.locals(least=int64_t)
cdef void mark_probes(Network net, int64_t i, int64_t b) noexcept nogil
cdef void clear_probes(Network net, int64_t i) noexcept nogil
cdef bint passes_probes(Network net, int64_t i, int64_t a, int64_t b) noexcept nogil
@cython.locals(worst=int64_t)
cdef bint better(Network net, int64_t i, int64_t a, int64_t b) noexcept nogil
cdef bint within(Items items, int64_t a, int64_t b) noexcept nogil
