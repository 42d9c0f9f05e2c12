"""The engine without a server, in a process of its own: a line of JSON with token ids in, the seconds until its first
token out. `benchmarks.server` holds the server's time against it."""

from __future__ import annotations

import json
import sys
import time

from sapwood.engine.llm import LLM
from sapwood.engine.params import SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(device_cache="1GiB", progress=False) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            begin = time.perf_counter()
            llm.generate({"prompt_token_ids": json.loads(line)}, params, use_tqdm=False)
            print(f"took {time.perf_counter() - begin:.6f}", flush=True)


if __name__ == "__main__":
    main()
