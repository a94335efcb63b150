cimport cython
from libc.stdint cimport int64_t

from .views cimport Chain, Clock

cdef double NO_STEP

@cython.locals(
    code=int64_t, c=int64_t, kind=int64_t, n=int64_t, d=int64_t, other=int64_t, waiting=int64_t, done=int64_t, step=double, begin=double,
    end=double
)
cpdef double run_orders(Chain chain, int64_t[::1] orders, Clock clock) noexcept nogil
@cython.locals(chunks=int64_t, at=int64_t, each=int64_t, total=int64_t, warm=int64_t, n=int64_t)
cpdef void write_warm_ups(Chain chain, const int64_t[::1] warm_ups, int64_t[::1] orders) noexcept nogil
@cython.locals(begin=int64_t)
cdef int64_t _turn(int64_t n, int64_t devices, int64_t each, int64_t microbatches) noexcept nogil
cpdef double run_warm_ups(Chain chain, const int64_t[::1] warm_ups, int64_t[::1] orders, Clock clock) noexcept nogil
@cython.locals(
    code=int64_t, c=int64_t, kind=int64_t, n=int64_t, d=int64_t, chosen=int64_t, standing=int64_t, rank=int64_t, later=int64_t, flying=int64_t,
    done=int64_t, step=double, begin=double, end=double, soonest=double, wanted=double
)
cpdef double schedule_by_list(Chain chain, const int64_t[::1] warm_ups, int64_t[::1] orders, Clock clock) noexcept nogil
@cython.locals(begin=int64_t, source=int64_t, far=int64_t, target=int64_t, found=double)
cpdef double improve_orders(Chain chain, int64_t[::1] orders, Clock clock, const int64_t[::1] draws, double step) noexcept nogil
@cython.locals(code=int64_t, changed=bint, way=int64_t, at=int64_t)
cdef bint _shift(int64_t[::1] orders, int64_t source, int64_t target) noexcept nogil
