"""`sapwood bench`: a model measured on this machine, or a server. Importing this package, and its `--help`, imports no
torch.

- `latency`, `throughput`, `cache`: what requests see; throughput also beside transformers' own generation (`peers`).
- `calibrate`: step times, from which `sapwood.sim` predicts how long a workload takes here.
- `profile`: where a step's time goes; `parts` reads what torch's profiler has seen.
- `run`: requests through an engine, timed. `tables`: figures as text and as JSON. `command`: the command line.
- `serve`: any OpenAI server. `workloads` are what it is asked, `load` when, `client` one request, `answers` what came
  of them, `serve_arguments` its command line.
- `paced`: an engine without a model, to measure a server alone.
"""
