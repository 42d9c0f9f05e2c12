"""`sapwood bench`: a model measured on this machine, or a server. Importing this package, and its `--help`, imports no
torch.

- `latency`, `throughput`, `cache`: what requests see; throughput also by transformers' own generation.
- `calibrate`: step times, from which `sapwood.sim` predicts how long a workload takes here.
- `profile`: where a step's time goes.
- `run`: requests through an engine, timed. `tables`: figures as text and as JSON. `command`: the command line,
  `arguments` its options.
- `serve`: any OpenAI server. `workloads` are what it is asked, `load` when, `client` one request and what came of it.
- `paced`: an engine without a model, to measure a server alone.
"""
