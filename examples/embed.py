"""Our scheduler inside your engine: plan, run, tell. `python examples/embed.py`

The model here is a toy that says the sum of the tokens in its row; yours gets the same arrays. Row i of a batch has
positions [starts[i], starts[i] + lengths[i]) of its request, whose pages are `plan.tables[group][slots[i]]`, in order.
"""

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.scheduler import Plan, RequestSpec, Scheduler, SchedulerConfig, StepDone


def run_model(plan: Plan) -> np.ndarray:
    """The next token of every row that yields one, in row order. A real one runs `plan.copies`, then the batch: K/V of
    positions from `write_from` on go into the row's pages, and attention reads those pages."""
    batch = plan.batch
    rows = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    return np.array([sum(row) % 50_000 for row, samples in zip(rows, batch.samples, strict=True) if samples], np.int32)


def main() -> None:
    config = SchedulerConfig(
        page_size=16,
        groups=[CacheGroup("layers", "full", device_pages=256)],
        max_batch_tokens=512,
        max_batch_size=8,
    )
    scheduler = Scheduler(config)
    system = list(range(1000, 1128))  # 128 tokens that all prompts begin with
    questions = {"ann": [7, 8, 9], "bob": [4, 5], "cyd": [6] * 40}
    scheduler.submit([RequestSpec(name, system + tokens, max_tokens=5) for name, tokens in questions.items()])

    ended = []
    while len(ended) < len(questions):
        plan = scheduler.next_plan()
        ended += plan.ended
        if plan.batch.ids:  # with host pages, a plan may have transfers only (examples/tiers.py): it wants no StepDone
            ended += scheduler.advance([StepDone(plan.step, run_model(plan))])

    for end in ended:
        print(
            f"{end.id}: {end.prompt} prompt tokens, {end.cached} cached, {end.computed} computed; {end.generated} new"
        )


if __name__ == "__main__":
    main()
