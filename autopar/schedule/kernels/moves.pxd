cimport cython
from libc.stdint cimport int64_t

from autopar.schedule.kernels.clock cimport copy_arrivals, step_of, adopt_timeline
from autopar.schedule.kernels.memory cimport peak_level, peak_bytes, price_call, recount_memory
from autopar.schedule.kernels.views cimport ArraySchedule, CallCosts, Lives, Order, Rows, Timeline

cdef int64_t ALONE, DRAW_BITS, MULTIPLIER, INCREMENT, MASK, SHIFT, SHIFT_AT_STALL, PULL_TO_STALL, UNBUCKET, MERGE
cdef int64_t NEAR_MOVES, PARTS_OF_MOVES, NEAR_PLACES, STALL_REACH, STALLS_AFTER, TRIES
cdef double EQUAL_SECONDS, ROUNDING, NOT_TRIED, TOO_LONG, TOO_LARGE

cpdef int64_t number_of_call(Order order, int64_t slots, int64_t item) noexcept nogil
cdef int64_t draw(int64_t[::1] random, int64_t count) noexcept nogil
cdef int64_t draw_kind(int64_t[::1] random, int64_t[::1] weights) noexcept nogil
cpdef (double, int64_t) descend(
    ArraySchedule arrays, Order order, Order before, CallCosts costs, Timeline known, Timeline timeline, Lives lives,
    int64_t[::1] stamps, int64_t[::1] places, int64_t[::1] stalls, int64_t[::1] random, int64_t[::1] weights, int64_t moves, int64_t limit, int64_t captured
) noexcept nogil
@cython.locals(kept=bint, regrouped=bint)
cdef double accept(
    ArraySchedule arrays, Order order, CallCosts costs, int64_t first, int64_t behind, Timeline known, Timeline timeline,
    Lives lives, double most, int64_t held, int64_t least, int64_t limit
) noexcept nogil
cdef int64_t find_stalls(Order order, Timeline known, int64_t[::1] places, int64_t[::1] stalls) noexcept nogil
cdef void stamp_rows(Rows rows, Order order, int64_t[::1] stamps, int64_t stamp, int64_t part) noexcept nogil
@cython.locals(kept=bint)
cdef int64_t shifted(
    ArraySchedule arrays, Order order, int64_t[::1] stamps, int64_t stamp,
    int64_t begin, int64_t reach, int64_t earlier, int64_t fixed
) noexcept nogil
cdef void slide(Order order, int64_t begin, int64_t end) noexcept nogil
cdef void copy(Order order, Order to) noexcept nogil
cdef double regrouped(
    ArraySchedule arrays, Order order, Order before, CallCosts costs, Timeline known, Timeline timeline, Lives lives,
    int64_t[::1] places, int64_t[::1] random, int64_t kind, double most, int64_t held, int64_t least, int64_t limit
) noexcept nogil
cdef int64_t draw_partner(ArraySchedule arrays, Order order, int64_t mine, int64_t[::1] random) noexcept nogil
cdef void leave(Order order, int64_t slot, int64_t rest) noexcept nogil
cdef void append(Order order, int64_t first, int64_t second) noexcept nogil
cdef int64_t furthest_place(
    Rows rows, Order order, Order before, int64_t[::1] places, int64_t part, int64_t call, int64_t place, int64_t sign
) noexcept nogil
cdef bint place_call(
    ArraySchedule arrays, Order order, Order before, int64_t[::1] places,
    int64_t mine, int64_t rest, int64_t call, int64_t[::1] random
) noexcept nogil
