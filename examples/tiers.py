"""Three tiers: device, host and a store of files that outlives the engine. `python examples/tiers.py [folder]`

Two engines run one after the other on the same folder, as a server does before and after a restart: the second finds
in the store what the first has computed. The model is a toy whose K/V are the tokens themselves, in numpy memory; one
in torch gives `TorchArena` its tensors instead (sapwood.engine.transfer.torch_mover), and all else stays.
"""

import hashlib
import os
import sys
import tempfile

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, EngineLoop, HostArena, Tiers, open_mover
from sapwood.scheduler import Plan, RequestSpec, Scheduler, SchedulerConfig, StepDone
from sapwood.store import Fingerprint, GroupLayout, open_store

PAGE = 16
GROUP = CacheGroup("layers", "full", device_pages=256, host_pages=512, page_bytes=4 * PAGE)


class Toy:
    """An executor: writes what a row computes into its pages, reads all it should see, and answers with the sum."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory  # [pages + 1, PAGE]

    def execute(self, plan: Plan) -> list[StepDone]:
        batch, answers, at = plan.batch, [], 0
        for copy in plan.copies:
            self.memory[copy.target, : copy.tokens] = self.memory[copy.source, : copy.tokens]
        for row, (start, length) in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)):
            table = plan.tables["layers"][batch.slots[row]]
            for position in range(max(start, batch.write_from["layers"][row]), start + length):
                self.memory[table[position // PAGE], position % PAGE] = batch.tokens[at + position - start]
            seen = self.memory[table].reshape(-1)[: start + length]
            answers += [int(seen.sum()) % 50_000] if batch.samples[row] else []
            at += length
        return [StepDone(plan.step, np.array(answers, np.int32))] if batch.ids else []


def engine(uri: str) -> EngineLoop:
    scheduler = Scheduler(SchedulerConfig(PAGE, [GROUP], max_batch_tokens=512, max_batch_size=8, store=True))
    memory = np.zeros((GROUP.device_pages + 1, PAGE), np.int32)
    mover = open_mover(DeviceArena({"layers": memory}), HostArena([GROUP]))
    weights = hashlib.sha256(b"the bytes of the weights").digest()
    layout = GroupLayout("layers", "full", GROUP.page_bytes, layout="tokens")
    store = open_store(uri, Fingerprint(weights, "int32", PAGE, (layout,), rank=0, ranks=1), process=True)
    return EngineLoop(scheduler, Toy(memory), Tiers(scheduler, mover, store))


def main() -> None:
    folder = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="sapwood-")
    for life in ("first", "second"):
        loop = engine(f"file://{folder}?size=64MiB")
        loop.submit([RequestSpec("ann", list(range(1000, 1100)), max_tokens=3)])
        tokens: list[int] = []
        while loop.live:
            step = loop.step()
            tokens += step.tokens().values()
            for end in step.ended:
                print(f"{life} life: {end.prompt} tokens asked, {end.cached} cached, {end.computed} computed: {tokens}")
            loop.rest()
        loop.close()


if __name__ == "__main__":
    main()
