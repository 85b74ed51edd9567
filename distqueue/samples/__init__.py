"""The sample table: metadata of millions of live samples, vectorized over batches; no clock, no device.

      put, ack, drop, lose         take                    find, places           snapshot
           │                        │                          │                     │
puts.py: refused or stored       views.py: what is ready                           snapshots.py: flat
as a whole                       for (task, columns),                              arrays and back
           │                     updated at every event
state.py ──┴─ ids to slots; a row is a slot of pages.py, and each table has its fields there:
   names.py      id ──► slot, and back; group by slot      claims.py   per task open, leased, acked; leases
   columns.py    which columns a row holds, their tokens   endings.py  how samples ended, the last ones by id
   segments.py   where the payload of a column lies
types.py         Selection, Taken, Ended: what enters and leaves the table
"""

from distqueue.samples.table import SampleTable
from distqueue.samples.types import Ended, Selection, Span, Taken

__all__ = ["Ended", "SampleTable", "Selection", "Span", "Taken"]
