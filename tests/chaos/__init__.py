"""Kill processes of runs at random moments, and check what the runs leave; `benchmarks/chaos.py` runs it."""
