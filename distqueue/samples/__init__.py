"""The sample table: metadata of millions of live samples, vectorized over batches; no clock, no device.

      put, ack, drop, lose         take                    find, places           snapshot
           │                        │                          │                     │
puts.py, lookups.py: names in,   search.py: oldest first   reports.py: why a get   snapshots.py: flat
refused or looked up at once     up to count or budget     waits, metrics          arrays and back
           │                        │ views.py: what is ready for (task, columns), updated at every event
state.py ──┴─ a row is a slot of pages.py, and each table has its fields there:
   names.py      id ──► slot, and back                     claims.py   per task open, leased, acked; leases
   columns.py    which columns a row holds, their tokens   groups.py   members of each group, in order
   segments.py   where the payload of a column lies        endings.py  how samples ended, the last ones by id
types.py         Selection, Taken, Ended: what enters and leaves the table
"""

from distqueue.samples.table import SampleTable
from distqueue.samples.types import Ended, Selection, Span, Taken

__all__ = ["Ended", "SampleTable", "Selection", "Span", "Taken"]
