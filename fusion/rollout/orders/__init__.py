"""The waiting requests of all groups, and which of them is dispatched next: one file per order. Pure.

    interface          Order: what the request buffer asks of one; Lengths: what is known of a group's responses
    ranked             RankedOrder: takes the lowest rank first; an order of one's own defines `rank`

    order              the next request is …                                       it knows
    fifo               the oldest                                                  nothing
    least_generated    the one with the fewest tokens so far                       nothing
    context            a probe; else one of the group with the longest estimate    finished siblings
    history            the one with the most tokens left, by estimate              last epoch, finished siblings
    oracle             the one with the most tokens left                           the length of every response
    histopipe          shortest or longest first, in turn                          last epoch

    stamped_heap       items by a rank that may change
    length_classes     classes of groups by length, and their shares of the engines (`histopipe`)

`rollout.schedule.order` is a name of `fusion.inference.config.ORDERS`, or `module:Class`, a subclass of `Order`. With
chunks (`rollout.schedule.chunk_tokens`) a request returns to the buffer after each of them, so an order decides again
and again; without, only where a response begins."""

from fusion.inference.config import ORDERS
from fusion.rollout.orders.interface import Order
from fusion.telemetry.classes import find_class


def find_order(name: str) -> type[Order]:
    """Import the class of an order. ``name``: a key of `ORDERS`, or `module:Class`. Raise ValueError if the module
    cannot be imported, or has no such subclass of `Order`."""
    return find_class(name, ORDERS, key=f"rollout.schedule.order={name}", base=Order)
