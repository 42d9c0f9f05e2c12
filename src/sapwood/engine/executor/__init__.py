"""From a plan to tokens: batches, graphs, attention over pages, sampling."""
