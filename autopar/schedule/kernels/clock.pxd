cimport cython
from libc.stdint cimport int64_t

from autopar.schedule.kernels.views cimport ArraySchedule, CallCosts, ClockTable, Order, Timeline

@cython.locals(host=double, all_issued=double, waited=double, launches=int64_t, settled=cython.bint, unsettled=double, now=double, busy=double, until=double, rate=double, begin=double, end=double, seconds=double)
cpdef double run_clock(
    ClockTable clock, Order order, CallCosts costs, int64_t last, int64_t number, int64_t first, int64_t behind, Timeline known, Timeline timeline
) noexcept nogil
cpdef double step_of(
    ArraySchedule arrays, Order order, CallCosts costs,
    int64_t first, int64_t behind, Timeline known, Timeline timeline
) noexcept nogil
cpdef void adopt_timeline(Timeline timeline, Timeline known, int64_t first, int64_t length, int64_t room) noexcept nogil
cpdef void copy_arrivals(Timeline timeline, Timeline to) noexcept nogil
