cimport cython
from libc.stdint cimport int64_t

cdef double FAR

cpdef int64_t join_rows(
    const int64_t[::1] group, const double[::1] cost, const int64_t[::1] ptr, const double[::1] other, double room, int64_t[::1] left,
    int64_t[::1] right
) noexcept nogil
cpdef int64_t least_rows(const int64_t[::1] key, const double[::1] cost, int64_t[::1] slots, int64_t[::1] kept) noexcept nogil
cdef int64_t slot_of(int64_t value, const int64_t[::1] key, int64_t[::1] slots, int64_t[::1] kept, int64_t mask) noexcept nogil
cpdef void add_least(
    double[::1] total, const int64_t[::1] key, const int64_t[::1] others, const double[::1] cost, int64_t[::1] slots, int64_t[::1] kept
) noexcept nogil
