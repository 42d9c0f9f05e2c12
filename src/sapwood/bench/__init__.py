"""`sapwood bench`: a model measured on this machine. Importing this package, and its `--help`, imports no torch.

- `latency`, `throughput`, `cache`: what requests see; throughput also beside transformers' own generation (`peers`).
- `calibrate`: step times, from which `sapwood.sim` predicts how long a workload takes here.
- `run`: requests through an engine, timed. `tables`: figures as text and as JSON. `command`: the command line.
"""
