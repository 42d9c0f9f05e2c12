"""lm-evaluation-harness, unmodified, on two tasks of our own: `lm_eval_client.py URL MODEL TOKENIZER FOLDER`.

Prints as JSON, for each way of asking, the accuracy of the choices, and for each choice its context, its text, its
log-likelihood and whether it was greedy; and what was generated. FOLDER is empty; nothing comes from a network.
"""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, NAME, TOKENIZER, FOLDER = sys.argv[1:]
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "banana", "seventeen"], "answer": 0},
    {"question": "The opposite of hot is", "choices": ["purple", "cold", "Wednesday"], "answer": 1},
    {"question": "Two plus two is equal to", "choices": ["the moon", "a horse and a cart", "four"], "answer": 2},
    {"question": "The sun rises in the", "choices": ["east", "soup", "of of of"], "answer": 0},
]
CHOOSE = """
task: choose
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WRITE = """
task: write
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
target_delimiter: " "
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def evaluated(batch_size=1, **more):
    arguments = {
        "model": NAME,
        "base_url": f"{URL}/v1/completions",
        "tokenizer": TOKENIZER,
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
        **more,
    }
    found = simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["choose", "write"],
        task_manager=TaskManager(include_path=FOLDER, include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    scores = [
        {"context": context, "text": text, "logprob": score, "greedy": greedy}
        for sample in found["samples"]["choose"]
        for (context, text), ((score, greedy),) in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    written = [sample["resps"][0][0] for sample in found["samples"]["write"]]
    return {"accuracy": found["results"]["choose"]["acc,none"], "scores": scores, "written": written}


(Path(FOLDER) / "questions.json").write_text(json.dumps(QUESTIONS))
for name, task in (("choose", CHOOSE), ("write", WRITE)):
    (Path(FOLDER) / f"{name}.yaml").write_text(task.format(data=f"{FOLDER}/questions.json"))
told = {
    "ids, one by one": evaluated(),
    "ids, in batches": evaluated(batch_size=4),
    "text, several at once": evaluated(tokenized_requests=False, num_concurrent=4),
}
sys.stdout.write("\nresult: " + json.dumps(told) + "\n")
