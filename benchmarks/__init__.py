"""What the product takes and brings, against a floor and peers: `python benchmarks/NAME.py --help`.

NAME.py            a command: what it measures, its options, its targets, and below `run_as` how it does so
NAME_….py          further parts of it
harness.py         arguments, sides in turns, figures, targets, the record of machine and commit
models.py          models with random weights, their engines and cards
runs.py, paced.py  runs as a user starts them; those on cards of modelled speed
"""
