from libc.stdint cimport int64_t

cdef class Rows:
    cdef const int64_t[::1] begins, entries

cdef class ClockTable:
    cdef const int64_t[::1] first, works, links, late, launches, reads_back
    cdef const double[::1] seconds
    cdef Rows flying
    cdef int64_t link_count, slowing
    cdef double slowdown, issue
    cdef bint overlaps

cdef class Timeline:
    cdef double[::1] begins, ends, stalls, since, busy, until, free_at, free, arrives, waited
    cdef int64_t[::1] issued, length

cdef class CallTable:
    cdef const int64_t[::1] classes, sent, came, target, packs, unpacks, gathers, reduces, storage, source, in_place, laid, put
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
    cdef int64_t[::1] staging, target, packs, unpacks, issued_in, issued_out, home

cdef class Lives:
    cdef int64_t[::1] begins, ends, lies, size, stamps, over, taken, freed, levels, entered, stamp
