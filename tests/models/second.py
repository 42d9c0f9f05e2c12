"""`python -m tests.models.second JOBS`: another process on the stores that the first one has filled.

JOBS is a JSON file: a list of {"folder", "store", "prompts", "new", "overlap"}. Prints, for each, what was said and how
many tokens of each prompt were cached, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sapwood import LLM, SamplingParams

FLAGS: dict[str, Any] = {
    "dtype": "float64",
    "device_cache": "8MiB",
    "host_cache": "8MiB",
    "max_num_seqs": 6,
    "page_size": 4,
    "max_model_len": 200,
    "progress": False,
}


def serve(folder: str, store: str, prompts: list[list[int]], new: int, overlap: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=new)
    with LLM(folder, store=store, store_patience=600, overlap=overlap, **FLAGS) as llm:
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
        return {
            "said": [output.outputs[0].token_ids for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }


if __name__ == "__main__":
    done = [serve(**job) for job in json.loads(Path(sys.argv[1]).read_text())]
    sys.stdout.write(json.dumps(done) + "\n")
