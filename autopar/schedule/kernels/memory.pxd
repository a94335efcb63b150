cimport cython
from libc.stdint cimport int64_t

from autopar.schedule.kernels.views cimport ArraySchedule, CallCosts, Lives, Order

@cython.locals(shared=bint)
cpdef void price_call(ArraySchedule arrays, Order order, CallCosts costs, int64_t head) noexcept nogil
cpdef void price_calls(ArraySchedule arrays, Order order, CallCosts costs) noexcept nogil
cdef int64_t home_of(CallCosts costs, int64_t storage) noexcept nogil
cpdef int64_t peak_bytes(ArraySchedule arrays, Order order, CallCosts costs, Lives lives) noexcept nogil
@cython.locals(called=bint)
cpdef int64_t recount_memory(
    ArraySchedule arrays, Order order, CallCosts costs, Lives lives, int64_t first, int64_t behind
) noexcept nogil
cpdef int64_t peak_level(Lives lives, int64_t count) noexcept nogil
cdef int64_t next_part(Order order, int64_t part, bint called) noexcept nogil
cdef void extend_life(Lives lives, int64_t storage, int64_t at, int64_t first, int64_t behind) noexcept nogil
cdef int64_t freed_bytes(Lives lives, int64_t storage, int64_t at) noexcept nogil
