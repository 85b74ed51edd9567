"""What both tests and benchmarks start processes with."""
