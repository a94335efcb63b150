"""A list as arrays, so that what it takes and holds in another order is known in microseconds.

======  =====================================================================================
arrays  what stays as it is whatever the order, and the order
costs   how long a list takes, and what it holds at most
moves   another order, and other calls that share buffers, found by one move after another
======  =====================================================================================
"""

from autopar.schedule.flat.arrays import Flat, Order, flat
from autopar.schedule.flat.moves import BITS, DRAWS, calls_of, descended

__all__ = ["BITS", "DRAWS", "Flat", "Order", "calls_of", "descended", "flat"]
