"""The sample table: metadata of a million live samples, every call over a whole batch, no clock and no device.

      put, ack, drop, lose         take                    find, places           snapshot
           │                        │                          │                     │
puts.py, lookups.py: names in,   search.py: oldest first   reports.py: why a want  snapshots.py: flat
refused or looked up at once     up to count or budget     waits, figures          arrays and back
           │                        │ views.py: what is ready for (task, columns), kept at every event
state.py ──┴─ a row is a slot of pages.py, and each table has its fields there:
   names.py      id ──► slot, a hash table in arrays       claims.py   per task open, leased, acked; leases
   columns.py    which columns a row holds, their tokens   groups.py   who belongs together, in what order
   segments.py   where the payload of a column lies        endings.py  how samples ended, the last ones by id
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
