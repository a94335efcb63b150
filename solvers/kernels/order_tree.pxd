cimport cython
from libc.stdint cimport int64_t

from .views cimport Chain, OrderTree

cdef int64_t DEPTH, NODES, STORED, FRESH, CAPACITY, VECTOR, BUCKETS, COMPARED, WORDS, LARGEST_WORD
cdef double NO_STEP, TOLERANCE

@cython.locals(i=int64_t, kind=int64_t, at=int64_t, c=int64_t, code=int64_t, op=int64_t, tail=double, d=int64_t, place=int64_t)
cpdef void fill_tails(Chain chain, OrderTree tree) noexcept nogil
@cython.locals(
    i=int64_t, kind=int64_t, at=int64_t, c=int64_t, code=int64_t, op=int64_t, head=double, d=int64_t, place=int64_t, bound=double,
    work=double, first=double
)
cpdef double bound_rest(Chain chain, OrderTree tree) noexcept nogil
@cython.locals(wide=int64_t, stop=int64_t, depth=int64_t)
cpdef bint explore(Chain chain, OrderTree tree, int64_t nodes) noexcept nogil
@cython.locals(
    left=int64_t, c=int64_t, kind=int64_t, code=int64_t, soonest=double, begin=double, device=int64_t, chosen=int64_t, count=int64_t,
    kept_back=int64_t, place=int64_t
)
cdef int64_t _branches(Chain chain, OrderTree tree, int64_t depth, int64_t at) noexcept nogil
cdef bint _sooner(OrderTree tree, int64_t microbatches, int64_t one, int64_t other) noexcept nogil
@cython.locals(c=int64_t, kind=int64_t, n=int64_t, begin=double)
cdef double _begin(Chain chain, OrderTree tree, int64_t code) noexcept nogil
@cython.locals(c=int64_t, kind=int64_t, d=int64_t, end=double)
cdef void _apply(Chain chain, OrderTree tree, int64_t depth, int64_t code) noexcept nogil
@cython.locals(c=int64_t, kind=int64_t, d=int64_t)
cdef void _undo(Chain chain, OrderTree tree, int64_t depth) noexcept nogil
@cython.locals(d=int64_t, at=int64_t, place=int64_t, code=int64_t, step=double)
cdef void _keep(Chain chain, OrderTree tree, int64_t depth) noexcept nogil
@cython.locals(
    words=int64_t, entry=int64_t, used=int64_t, total=int64_t, at=int64_t, key=int64_t, word=int64_t, d=int64_t, c=int64_t, kind=int64_t,
    code=int64_t, other=int64_t, hop=double, i=int64_t, compared=int64_t, seen=int64_t, before=int64_t, place=int64_t
)
cdef bint _dominated(Chain chain, OrderTree tree) noexcept nogil
