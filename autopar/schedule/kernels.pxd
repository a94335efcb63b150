cimport cython
from libc.stdint cimport int64_t

cdef int64_t ALONE, DRAW_BITS, MULTIPLIER, INCREMENT, MASK, SHIFT, SHIFT_AT_STALL, PULL_TO_STALL, UNBUCKET, MERGE
cdef int64_t NEAR_MOVES, FIXED_ORDER, MEMORY_LAST, NEAR_BUCKETS, NEAR_PLACES, STALL_REACH, STALLS_AFTER, TRIES
cdef double GAIN_OF_SPLIT, ROUNDING

cdef class Rows:
    cdef const int64_t[::1] begins, entries

cdef class ClockTable:
    cdef const int64_t[::1] first, works, links, late
    cdef const double[::1] seconds
    cdef Rows flying
    cdef int64_t link_count
    cdef double slowdown
    cdef bint overlaps

cdef class Timeline:
    cdef double[::1] since, begins, ends, stalls, free, arrives

cdef class CallTable:
    cdef const int64_t[::1] classes, sent, came, target, packs, unpacks, gathers, reduces, storage, source, in_place
    cdef const double[::1] latency, beyond, launch, slope

cdef class InstructionTable:
    cdef const int64_t[::1] segment, workspace
    cdef Rows before, after, needs, makes, takes

cdef class StorageTable:
    cdef const int64_t[::1] bytes, entered, stays

cdef class ArraySchedule:
    cdef ClockTable clock
    cdef InstructionTable items
    cdef CallTable calls
    cdef StorageTable storages
    cdef const int64_t[::1] rounds

cdef class Order:
    cdef int64_t[::1] items, length, head, after

cdef class CallCosts:
    cdef double[::1] seconds, copies
    cdef int64_t[::1] staging, target, packs, unpacks, home

cdef class Lives:
    cdef int64_t[::1] begins, ends, lies, size, started, over, levels

cpdef int64_t number_of_call(Order order, int64_t slots, int64_t item) noexcept nogil
@cython.locals(now=double, busy=double, until=double, rate=double, begin=double, end=double, seconds=double)
cpdef double run_clock(
    ClockTable clock, Order order, double[::1] starts,
    double[::1] copies, int64_t last, Timeline timeline
) noexcept nogil
cpdef double step_of(ArraySchedule arrays, Order order, CallCosts costs, Timeline timeline) noexcept nogil
@cython.locals(shared=bint)
cdef void price_call(ArraySchedule arrays, Order order, CallCosts costs, int64_t head) noexcept nogil
cpdef void price_calls(ArraySchedule arrays, Order order, CallCosts costs) noexcept nogil
cdef int64_t home_of(CallCosts costs, int64_t storage) noexcept nogil
@cython.locals(called=bint)
cpdef int64_t peak_bytes(ArraySchedule arrays, Order order, CallCosts costs, Lives lives) noexcept nogil
cdef int64_t draw(int64_t[::1] random, int64_t count) noexcept nogil
cdef int64_t draw_kind(int64_t[::1] random, int64_t[::1] weights) noexcept nogil
cpdef (double, int64_t) descend(
    ArraySchedule arrays, Order order, Order before, CallCosts costs, Timeline timeline, Lives lives, int64_t[::1] stamps,
    int64_t[::1] places, int64_t[::1] stalls, int64_t[::1] random, int64_t[::1] weights, int64_t moves, int64_t limit, int64_t captured
) noexcept nogil
cdef double accept(
    ArraySchedule arrays, Order order, CallCosts costs, Timeline timeline,
    Lives lives, double most, int64_t held, int64_t least, int64_t limit
) noexcept nogil
cdef int64_t find_stalls(
    ArraySchedule arrays, Order order, CallCosts costs,
    Timeline timeline, int64_t[::1] places, int64_t[::1] stalls
) noexcept nogil
cdef void stamp_rows(Rows rows, Order order, int64_t[::1] stamps, int64_t stamp, int64_t part) noexcept nogil
@cython.locals(kept=bint)
cdef int64_t shifted(
    ArraySchedule arrays, Order order, int64_t[::1] stamps, int64_t stamp,
    int64_t begin, int64_t reach, int64_t earlier, int64_t fixed
) noexcept nogil
cdef void slide(Order order, int64_t begin, int64_t end) noexcept nogil
cdef void copy(Order order, Order to) noexcept nogil
cdef double regrouped(
    ArraySchedule arrays, Order order, Order before, CallCosts costs, Timeline timeline, Lives lives,
    int64_t[::1] places, int64_t[::1] random, int64_t kind, double most, int64_t held, int64_t least, int64_t limit
) noexcept nogil
cdef int64_t draw_partner(ArraySchedule arrays, Order order, int64_t mine, int64_t[::1] random) noexcept nogil
cdef void leave(Order order, int64_t slot, int64_t rest) noexcept nogil
cdef void append(Order order, int64_t first, int64_t second) noexcept nogil
cdef bint place_call(
    ArraySchedule arrays, Order order, Order before, int64_t[::1] places,
    int64_t mine, int64_t rest, int64_t call, int64_t[::1] random
) noexcept nogil
