cimport cython
from libc.stdint cimport int64_t

from autopar.schedule.kernels.views cimport ArraySchedule, CallCosts, ClockTable, Order, Timeline

@cython.locals(now=double, busy=double, until=double, rate=double, begin=double, end=double, seconds=double)
cpdef double run_clock(
    ClockTable clock, Order order, double[::1] starts,
    double[::1] copies, int64_t last, Timeline timeline
) noexcept nogil
cpdef double step_of(ArraySchedule arrays, Order order, CallCosts costs, Timeline timeline) noexcept nogil
