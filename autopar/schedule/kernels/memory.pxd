cimport cython
from libc.stdint cimport int64_t

from autopar.schedule.kernels.views cimport ArraySchedule, CallCosts, Lives, Order

@cython.locals(shared=bint)
cpdef void price_call(ArraySchedule arrays, Order order, CallCosts costs, int64_t head) noexcept nogil
cpdef void price_calls(ArraySchedule arrays, Order order, CallCosts costs) noexcept nogil
cdef int64_t home_of(CallCosts costs, int64_t storage) noexcept nogil
@cython.locals(called=bint)
cpdef int64_t peak_bytes(ArraySchedule arrays, Order order, CallCosts costs, Lives lives) noexcept nogil
