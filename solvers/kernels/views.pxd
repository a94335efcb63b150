from libc.stdint cimport int16_t, int64_t, uint8_t

cdef class Graph:
    cdef const int64_t[::1] ptr, low, high, at, adj_ptr, adj, split, to_low, to_high
    cdef const double[::1] table, turned
    cdef double[::1] scratch

cdef class Items:
    cdef const int64_t[::1] ptr, begin, end, usage, capacity

cdef class Workspace:
    cdef double[::1] pool, key, entries, heap_key, sums
    cdef int16_t[::1] best
    cdef const int64_t[::1] near_ptr
    cdef int64_t[::1] near, near_count, state, order, position, scope_ptr, scope, table_at, bucket, bucket_next
    cdef int64_t[::1] heap_node, ints, stride, level, label, queue, starts

cdef class Network:
    cdef const int64_t[::1] ptr
    cdef int64_t[::1] live, live_count, cost, degree, head, following, eu, ev, at, pool, edge_queue, node_queue, log_data, mark, scalars
    cdef uint8_t[::1] present, heavy, edge_live, edge_waits, node_waits, touched
    cdef int64_t[:, ::1] log

cdef class Chain:
    cdef const double[::1] seconds, hop, held, room
    cdef const int64_t[::1] place, sizes

cdef class Clock:
    cdef double[::1] ends, ready, usage
    cdef int64_t[::1] count, at, queue, waits

cdef class OrderTree:
    cdef double[::1] ends, ready, usage, tails, heads, begins, saved, until, vectors, best
    cdef int64_t[::1] count, blocked, open, width, lines, kept_back, by_tail, line_ptr, scalars, bucket, following, keys, orders
    cdef const int64_t[::1] flight, tight
