"""What the product takes and brings, against a floor and peers: `python benchmarks/NAME.py --help`.

NAME.py            a command: what it measures, its options, its targets; imports nothing that takes time
NAME_….py          its parts
harness.py         arguments, sides in turns, figures, targets, the record of machine and commit
runs.py, paced.py  runs as a user starts them; those on cards of modelled speed
"""
