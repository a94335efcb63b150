cimport cython
from libc.stdint cimport int64_t

cpdef int64_t join_rows(
    const int64_t[::1] group, const double[::1] cost, const int64_t[::1] ptr, const double[::1] other, double room, int64_t[::1] left,
    int64_t[::1] right
) noexcept nogil
cpdef int64_t least_rows(const int64_t[::1] key, const double[::1] cost, int64_t[::1] slots, int64_t[::1] kept) noexcept nogil
