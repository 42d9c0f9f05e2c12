"""LoRA adapters made by PEFT, many in one batch, against PEFT with each alone. Tiny models with random weights."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sapwood.engine.lora.adapters import Adapter, Adapters, Routing, UnknownAdapter
from sapwood.engine.lora.files import AdapterError

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft"),
]
WORDS = 97
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
Q = "model.layers.0.self_attn.q_proj"


def model_of(family: str, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,  # q, k and v have biases
        "moe": transformers.Qwen3MoeConfig,
    }[family](**{**SIZES, **sizes}, attn_implementation="eager")
    if family == "moe":
        config.update({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8})
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def adapter(folder: Path, model: torch.nn.Module, seed: int = 0, **options) -> Path:
    """A folder that PEFT wrote, with random A and B."""
    options = {"target_modules": ["q_proj"], "r": 4, "task_type": "CAUSAL_LM", **options}
    tuned = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(init_lora_weights=False, **options))
    torch.manual_seed(seed)
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    tuned.save_pretrained(folder)
    return folder


def rewrite(folder: Path, config=None, tensors=None) -> Path:
    """Change the files of an adapter: functions that change a dict in place."""
    if config:
        path = folder / "adapter_config.json"
        content = json.loads(path.read_text())
        config(content)
        path.write_text(json.dumps(content))
    if tensors:
        path = folder / "adapter_model.safetensors"
        found = {name: tensor.clone() for name, tensor in load_file(path).items()}
        tensors(found)
        save_file(found, path)
    return folder


def backwards(path: Path) -> None:
    """Write the tensors of a file in the opposite order, as another writer may."""
    header: dict = {"__metadata__": {"by": "hand"}}
    data = b""
    for name, tensor in sorted(load_file(path).items(), reverse=True):
        piece = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": "F64", "shape": list(tensor.shape), "data_offsets": offsets}
        data += piece
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def flat(model: torch.nn.Module, rows: list[list[int]]) -> list[torch.Tensor]:
    """The logits of rows that run as one flat batch, as the engine runs them."""
    lengths = [len(row) for row in rows]
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    sees = (row_of[:, None] == row_of) & torch.ones(len(row_of), len(row_of), dtype=torch.bool).tril()
    mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.tensor([token for row in rows for token in row])
    with torch.inference_mode():
        out = model(ids[None], attention_mask=mask[None, None], position_ids=positions[None], use_cache=False)
    return list(out.logits[0].split(lengths))


def alone(model: torch.nn.Module, folder: Path | None, tokens: list[int]) -> torch.Tensor:
    """The logits of one row by PEFT, or by the base model."""
    if folder is not None:
        model = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-6) -> bool:
    """Norms and rotary frequencies are float32 in transformers, whatever the model is."""
    return bool((one - other).abs().max() < tolerance)


def any_options(rng: random.Random) -> dict:
    """One way to say which modules an adapter changes, and by how much."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = rng.choice(
        [
            {"target_modules": "all-linear"},
            {"target_modules": rng.sample(names, 3)},
            {"target_modules": ["mlp.down_proj", "model.layers.1.self_attn.k_proj"]},
            {"target_modules": r".*\.(1\.mlp\.up_proj|0\.self_attn\.[qv]_proj)"},
            {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": rng.choice([1, [0], [0, 1]])},
            {"target_modules": ["v_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
            {"target_modules": names, "exclude_modules": ["0.self_attn.q_proj", "up_proj"]},
        ]
    )
    options |= {"r": rng.randint(1, 8), "lora_alpha": rng.choice([1, 8, 13]), "use_rslora": rng.random() < 0.5}
    if rng.random() < 0.6:
        options["rank_pattern"] = {"layers.1.self_attn.k_proj": 3, "up_proj": rng.randint(1, 8), "(q|o)_proj": 5}
    if rng.random() < 0.6:
        options["alpha_pattern"] = {"down_proj": 21, "layers.0.*_proj": 2, "^model.layers.1.self_attn.v_proj": 5}
    return options


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_l01_a_mixed_batch_is_each_adapter_alone(family, seed, tmp_path):
    """Rows of the base model and of five adapters, in any order, some of them neighbours: each row has the logits that
    PEFT gives it alone, whatever ranks, scales, patterns and modules its adapter has.

    Mutation: `scale` leaves out `use_rslora`; `_by_pattern` takes the last match; `_in_layers` is always true;
    `index_add_` goes to the first tokens; `add` takes the first slot for everybody; `upload` writes slot 1.
    """
    rng = random.Random(f"{family} {seed}")
    model = model_of(family)
    folders = [None, *(adapter(tmp_path / str(i), model, i, **any_options(rng)) for i in range(5))]
    rows = [(folder, [rng.randrange(WORDS) for _ in range(rng.randint(1, 9))]) for folder in folders * 2]
    rng.shuffle(rows)
    expected = [alone(model, folder, tokens) for folder, tokens in rows]
    base = [alone(model, None, tokens) for _, tokens in rows]

    adapters = Adapters(model, max_loras=5, max_rank=8)
    digest_of = {folder: folder and adapters.load(folder.name, folder) for folder in folders}
    routing = adapters.begin([digest_of[folder] for folder, _ in rows], [len(tokens) for _, tokens in rows])
    with adapters.applied(routing):
        found = flat(model, [tokens for _, tokens in rows])
    adapters.end(routing)

    for (folder, _), mine, theirs, plain in zip(rows, found, expected, base, strict=True):
        assert close(mine, theirs)
        assert close(theirs, plain) == (folder is None), "an adapter that changes nothing proves nothing"
    assert all(map(close, flat(model, [tokens for _, tokens in rows]), base)), "nothing is left after the step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype, tmp_path):
    """An adapter of another dtype is as right as the model's own dtype allows.

    Mutation: `_host_copy` leaves out the scale; `_upload` does nothing.
    """
    model = model_of("llama")
    folder = adapter(tmp_path / "a", model, target_modules="all-linear")
    tokens = list(range(20))
    expected = alone(model, folder, tokens)
    model.to(dtype)
    adapters = Adapters(model, 1, 8)
    with adapters.applied(adapters.begin([adapters.load("a", folder)], [20])):
        found = alone(model, None, tokens)
    assert found.dtype == dtype
    assert close(found, expected, 1e-4 if dtype == torch.float32 else 0.2)
    assert not close(alone(model, None, tokens), expected, 0.2)


def test_values_that_the_dtype_does_not_hold(tmp_path):
    """What is finite in the file and is not in the model's dtype, or once it is scaled, is refused.

    Mutation: `_host_copy` keeps the dtype of the file; or looks at B before it is scaled.
    """
    folder = adapter(tmp_path / "a", model_of("llama"), lora_alpha=64)
    rewrite(folder, tensors=lambda found: [tensor.fill_(8000.0) for tensor in found.values()])
    Adapters(model_of("llama"), 1, 8).read(folder)
    refused(Adapters(model_of("llama").half(), 1, 8), folder, f"{Q} has values that are not finite in torch.float16")


class Lone:
    """Adapters on one small linear layer, without PEFT: what each must add is known by its letter."""

    def __init__(self, tmp_path: Path, max_loras: int = 1, **options) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.ModuleDict({"fc": torch.nn.Linear(6, 5).double(), "other": torch.nn.Linear(6, 5)})
        self.path = tmp_path
        self.linear = self.model["fc"]
        self.base = copy.deepcopy(self.linear)
        self.adapters = Adapters(self.model, max_loras, 4, **options)
        self.uploads: list[int] = []
        upload = self.adapters._upload
        self.adapters._upload = lambda slot, adapter: (self.uploads.append(slot), upload(slot, adapter))
        self.read: dict[str, Adapter] = {}

    def pair(self, letter: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(ord(letter))
        rank = 1 + ord(letter) % 4
        return tuple(torch.randn(shape, generator=generator).double() for shape in ((rank, 6), (5, rank)))

    def folder(self, letter: str) -> Path:
        folder = self.path / letter
        folder.mkdir(exist_ok=True)
        a, b = self.pair(letter)
        config = {"peft_type": "LORA", "r": len(a), "lora_alpha": 2 * len(a), "target_modules": ["fc"]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {"base_model.model.fc.lora_A.weight": a, "base_model.model.fc.lora_B.weight": b}
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    def load(self, letter: str) -> bytes:
        if letter not in self.read:
            self.read[letter] = self.adapters.read(self.folder(letter))
        return self.adapters.add(letter, self.read[letter])

    def begin(self, letters: str, digests: dict[str, bytes]) -> Routing | None:
        """A step with a row for each letter, "-" for the base model; row i has i + 1 tokens."""
        rows = [digests.get(letter) for letter in letters]
        return self.adapters.begin(rows, [i + 1 for i in range(len(rows))])

    def right(self, letters: str, routing: Routing | None) -> bool:
        """Whether a forward with this routing adds what the letters of its rows say."""
        tokens = [letter for i, letter in enumerate(letters) for _ in range(i + 1)]
        x = torch.randn(1, len(tokens), 6, dtype=torch.float64)
        with torch.inference_mode(), self.adapters.applied(routing):
            found = self.linear(x)[0]
        for i, letter in enumerate(tokens):
            expected = self.base(x[0, i])
            if letter != "-":
                a, b = self.pair(letter)
                expected = expected + 2 * b @ (a @ x[0, i])
            if not close(found[i], expected, 1e-12):
                return False
        return True


def test_two_steps_in_flight_have_slots_of_their_own(tmp_path):
    """Steps N and N+1 need different adapters, and N runs last: both are right. A third finds no slot, which changes
    nothing for them; when N is over, its slot is taken and not that of N+1.

    Mutation: `busy` is empty; `slots` is `max_loras`; `end` forgets everybody.
    """
    lone = Lone(tmp_path)
    digests = {letter: lone.load(letter) for letter in "ABCD"}
    first, second = lone.begin("A-A", digests), lone.begin("B", digests)
    with pytest.raises(RuntimeError, match="1 adapters in a step, 2 slots in use by steps in flight, 2 slots"):
        lone.begin("C", digests)
    assert lone.right("B", second) and lone.right("A-A", first)
    lone.adapters.end(first)
    third = lone.begin("CC", digests)
    with pytest.raises(RuntimeError, match="2 slots in use"):
        lone.begin("D", digests)
    assert lone.right("B", second) and lone.right("CC", third)


def test_the_least_recently_used_adapter_is_replaced(tmp_path):
    """An adapter that is on the device is not uploaded again; who has not been used for longest makes room, and not one
    that the same step needs.

    Mutation: `begin` forgets `move_to_end`; `idle` is made without a look at `wanted`.
    """
    lone = Lone(tmp_path, max_loras=3, slots=3)
    digests = {letter: lone.load(letter) for letter in "ABCD"}
    history = []
    for letters in ("A", "B", "C", "A", "D", "AC", "B", "ACB", "DA"):
        routing = lone.begin(letters, digests)
        assert lone.right(letters, routing)
        lone.adapters.end(routing)
        history.append((letters, len(lone.uploads)))
        lone.uploads.clear()
    # D takes B's place; B comes back in D's; at last A is the oldest, but D cannot take the place of its neighbour.
    assert history == [("A", 1), ("B", 1), ("C", 1), ("A", 0), ("D", 1), ("AC", 0), ("B", 1), ("ACB", 0), ("DA", 1)]


def test_l17_max_loras_adapters_fit_in_a_step_while_another_runs(tmp_path):
    """Any two steps of `max_loras` adapters each can be in flight. Fewer slots than `max_loras` is refused.

    Mutation: `slots` is `max_loras + 1`.
    """
    lone = Lone(tmp_path, max_loras=3)
    digests = {letter: lone.load(letter) for letter in "ABCDEF"}
    steps = [(letters, lone.begin(letters, digests)) for letters in ("AB-CA", "DEF")]
    assert all(lone.right(*step) for step in steps)
    for options, message in (((3, 4, 2), "slots must be at least max_loras, which is 3, got 2"), ((0, 4), "max_loras")):
        with pytest.raises(ValueError, match=message):
            Adapters(lone.model, *options)


@pytest.mark.parametrize("seed", range(3))
def test_l04_random_steps_loads_and_unloads(seed, tmp_path):
    """Requests come and go, adapters are unloaded under them and loaded again, up to two steps are in flight: every
    forward adds what its rows are bound to, also the one that runs after the next has begun. With a slot less than two
    steps may need, the next sometimes has to wait.

    Mutation: `_drop` does not look at `_holders`; `busy` is empty.
    """
    rng = random.Random(seed)
    lone = Lone(tmp_path, max_loras=2, slots=3)
    adapters = lone.adapters
    digests = {letter: lone.load(letter) for letter in "ABCDEF"}
    bound: list[str] = []
    flights: list[tuple[str, Routing | None]] = []
    waits = 0
    for _ in range(400):
        letter = rng.choice("ABCDEF")
        if letter not in adapters.names():
            lone.load(letter)
        elif rng.random() < 0.3:
            adapters.unload(letter)
        elif len(bound) < 12:
            adapters.hold(digests[letter])
            bound.append(letter)
        if bound and rng.random() < 0.3:
            adapters.release(digests[bound.pop(rng.randrange(len(bound)))])
        few = rng.sample(sorted(set(bound)), min(2, len(set(bound))))
        letters = "".join(rng.choice([*few, "-"]) for _ in range(rng.randint(1, 5)))
        try:
            flights.append((letters, lone.begin(letters, digests)))
            waited = False
        except RuntimeError:
            waited, waits = True, waits + 1
        if waited or len(flights) == 2:
            letters, routing = flights.pop(0)
            assert lone.right(letters, routing)
            adapters.end(routing)
    assert waits and len(lone.uploads) > 50


def test_l04_unloaded_while_requests_hold_it(tmp_path):
    """An unloaded adapter is gone for new requests at once, and right for those that are bound to it, also after its
    slot was taken by others; the host copy goes with the last of them.

    Mutation: `unload` drops the host copy; `release` drops it while others hold it; `unload` leaves the name.
    """
    lone = Lone(tmp_path)
    adapters = lone.adapters
    digests = {letter: lone.load(letter) for letter in "ABC"}
    adapters.hold(digests["A"])
    adapters.hold(digests["A"])
    assert adapters.unload("A") == digests["A"]
    assert sorted(adapters.names()) == ["B", "C"]
    with pytest.raises(UnknownAdapter, match="adapter 'A' is not loaded"):
        adapters.digest_of("A")
    adapters.release(digests["A"])
    for letter in "BCA":
        routing = lone.begin(letter, digests)
        assert lone.right(letter, routing)
        adapters.end(routing)
    adapters.release(digests["A"])
    for ask in (lambda: adapters.hold(digests["A"]), lambda: lone.begin("A", digests)):
        with pytest.raises(UnknownAdapter, match=digests["A"].hex()):
            ask()
    assert lone.load("A") == digests["A"]
    assert lone.right("A", lone.begin("A", digests))


def test_l16_a_row_with_an_unknown_adapter_is_named(tmp_path):
    """The error tells the adapter and its rows; nothing has begun, and the same batch without them runs.

    Mutation: `begin` takes slot 0 for who is unknown; `rows` counts tokens.
    """
    lone = Lone(tmp_path)
    digests = {"A": lone.load("A"), "X": hashlib.sha256(b"X").digest()}
    for _ in range(5):
        with pytest.raises(UnknownAdapter, match=rf"{digests['X'].hex()}, which rows \[1, 3\] of the batch") as error:
            lone.begin("AX-XA", digests)
        assert error.value.rows == [1, 3] and error.value.adapter == digests["X"]
    assert lone.right("A-A", lone.begin("A-A", digests))
    with pytest.raises(UnknownAdapter):
        lone.adapters.unload("X")


def test_base_rows_alone_need_nothing(tmp_path):
    """A step without adapters has no routing, takes no slot, and gives the bits of the base model.

    Mutation: `begin` returns a routing for all-base rows.
    """
    lone = Lone(tmp_path)
    digest = lone.load("A")
    kept = lone.begin("A", {"A": digest})
    for _ in range(5):
        routing = lone.begin("---", {})
        assert routing is None
        x = torch.randn(1, 6, 6, dtype=torch.float64)
        with lone.adapters.applied(routing):
            assert torch.equal(lone.linear(x), lone.base(x))
        lone.adapters.end(routing)
    assert lone.right("A", kept) and len(lone.uploads) == 1


def test_a_module_that_sees_some_tokens_is_given_its_part(tmp_path):
    """Mixers of recurrent layers take rows apart: with the part of these tokens, in their order, each gets its own
    adapter. Tokens that the routing does not know are an error, and the routing around it is back afterwards.

    Mutation: `part` sorts the tokens; `applied` sets None when it ends; `add` does not compare the lengths.
    """
    lone = Lone(tmp_path, max_loras=2)
    digests = {letter: lone.load(letter) for letter in "AB"}
    routing = lone.begin("A-BA", digests)  # tokens: A - - B B B A A A A
    with lone.adapters.applied(routing):
        assert lone.right("BA", routing.part(np.array([3, 9, 0])))
        assert lone.right("A-", routing.part(slice(0, 3)))
        assert routing.part(slice(1, 3)) is None
        with pytest.raises(RuntimeError, match="fc was given 3 tokens and the adapters are routed for 10"):
            lone.linear(torch.zeros(3, 1, 6, dtype=torch.float64))
        assert lone.adapters.routing is routing
    assert lone.adapters.routing is None
    assert lone.right("A-BA", routing)


def test_an_upload_that_fails_leaves_a_free_slot(tmp_path):
    """The step fails, and the next one uploads again: no slot is taken for filled, and none is lost.

    Mutation: `begin` notes the slot before the upload.
    """
    lone = Lone(tmp_path)
    digests = {letter: lone.load(letter) for letter in "ABC"}
    wrapped = lone.adapters._wrapped["fc"]
    upload = wrapped.upload
    for letter in "ABCA":
        wrapped.upload = lambda slot, pair: 1 / 0
        with pytest.raises(ZeroDivisionError):
            lone.begin(letter, digests)
        wrapped.upload = upload
        routing = lone.begin(letter, digests)
        assert lone.right(letter, routing)
        lone.adapters.end(routing)


def test_slots_are_padded_with_zeros(tmp_path):
    """Whoever multiplies with whole slots, at max_rank and with slot 0 for base rows, gets the same: nothing of an
    adapter that was there before is left beyond the rank of the next, or in modules it does not change.

    Mutation: `upload` does not zero the padding, or nothing if the pair is None.
    """
    model = model_of("llama")
    adapters = Adapters(model, 1, 8, slots=1)
    wide = adapters.load("wide", adapter(tmp_path / "wide", model, r=8, target_modules="all-linear"))
    thin = adapters.load("thin", adapter(tmp_path / "thin", model, r=2))
    x = {False: torch.randn(7, 32, dtype=torch.float64), True: torch.randn(7, 48, dtype=torch.float64)}
    for digest in (wide, thin):
        with adapters.applied(routing := adapters.begin([digest], [7])):
            for name, wrapped in adapters._wrapped.items():
                rows = x["down" in name]
                by_slot = [rows @ a.t() @ b.t() for a, b in zip(wrapped.a, wrapped.b, strict=True)]
                assert not by_slot[0].any()
                assert close(wrapped(rows) - wrapped.base(rows), by_slot[1], 1e-12)
        adapters.end(routing)
    assert adapters.nbytes == sum(2 * 8 * 8 * sum(wrapped.shape) for wrapped in adapters._wrapped.values())


def test_l08_identity_is_the_content(tmp_path):
    """One content under two names, from two folders, saved by other means, is one adapter: what is only told of an
    adapter does not count. Every byte of every tensor and everything that scales them does.

    Mutation: `digest_heads` leaves out the scale; `_brought` leaves out B, or takes tensors in the order of the file.
    """
    model = model_of("llama")
    options = {"target_modules": ["q_proj", "k_proj"], "r": 2}
    adapters = Adapters(model, 1, 8)
    folders = [adapter(tmp_path / name, model, 1, **options) for name in "ab"]
    digest = adapters.load("a", folders[0])
    assert len(digest) == 32

    def retold(config: dict) -> None:
        config.update(lora_dropout=0.3, base_model_name_or_path="elsewhere", r=3, lora_alpha=8, use_rslora=False)
        config.update(rank_pattern={"q_proj": 2, "k_proj": 2}, target_modules="all-linear")
        config.update(exclude_modules=r".*(mlp.*|[vo]_proj)", peft_version="1.0", future_number=3, future_switch=False)

    rewrite(folders[1], retold)
    backwards(folders[1] / "adapter_model.safetensors")
    assert adapters.load("b", folders[1]) == digest == adapters.load("a", folders[1])
    assert adapters.names() == {"a": digest, "b": digest}

    seen = {digest}
    changes = [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"layers.1.self_attn.k_proj": 2}}]
    for change in changes:
        folder = adapter(tmp_path / "c", model, 1, **options)
        seen.add(adapters.read(rewrite(folder, lambda config, change=change: config.update(change))).digest)
    rng = random.Random(0)
    folder = adapter(tmp_path / "c", model, 1, **options)
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    places = [begin, len(whole) - 1, *rng.sample(range(begin, len(whole)), 60)]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        seen.add(adapters.read(folder).digest)
    assert len(seen) == 1 + len(changes) + len(set(places))

    def swapped(tensors: dict) -> None:
        one, other = (f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in (0, 1))
        tensors[one], tensors[other] = tensors[other], tensors[one]

    path.write_bytes(whole)
    assert adapters.read(rewrite(folder, tensors=swapped)).digest not in seen


def test_l08_other_content_under_a_name_in_use(tmp_path):
    """It is refused, and nothing changes; `replace` gives the name to the new content at once, and who is bound to the
    old one keeps it; after `unload` the name is free. Loading what is loaded is free.

    Mutation: `add` overwrites; `replace` drops what is held.
    """
    lone = Lone(tmp_path)
    adapters = lone.adapters
    digests = {letter: adapters.load("name", lone.folder(letter)) for letter in "A"}
    assert adapters.load("name", lone.folder("A")) == digests["A"]
    with pytest.raises(AdapterError, match="the name 'name' is in use for other content"):
        adapters.load("name", lone.folder("B"))
    assert adapters.names() == {"name": digests["A"]}

    adapters.hold(digests["A"])
    digests["B"] = adapters.replace("name", lone.folder("B"))
    assert adapters.digest_of("name") == digests["B"] != digests["A"]
    for letter in "AB":
        assert lone.right(letter, lone.begin(letter, digests))
    with pytest.raises(AdapterError, match="no such folder"):
        adapters.replace("name", tmp_path / "nowhere")
    assert adapters.replace("name", lone.folder("B")) == adapters.digest_of("name") == digests["B"]
    adapters.unload("name")
    assert adapters.load("name", lone.folder("C")) not in digests.values()
    with pytest.raises(ValueError, match="needs a name"):
        adapters.load("", lone.folder("C"))


A, B = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")
CONFIGS = [
    ({"peft_type": "IA3"}, "peft_type='IA3': only LORA is supported"),
    ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS': only CAUSAL_LM is supported"),
    ({"bias": "lora_only"}, "bias='lora_only': trained biases are not supported"),
    ({"use_dora": True}, "use_dora=True: DoRA is not supported"),
    ({"lora_bias": True}, "lora_bias=True: a bias beside lora_B"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: modules trained as a whole"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices=.*trained embeddings"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters=.*fused MoE experts"),
    ({"layer_replication": [[0, 2]]}, "layer_replication=.*not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True: it is for Conv1D weights"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens=.*activated LoRA"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': it changes the base weights"),
    ({"use_something_new": True}, "use_something_new=True: this field is not known here"),
    ({"something_config": {"a": 1}}, "something_config=.*: this field is not known here"),
    ({"r": 0}, "r=0: must be a whole number above 0"),
    ({"r": True}, "r=True: must be a whole number above 0"),
    ({"lora_alpha": "8"}, "lora_alpha='8': must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan: must be a number"),
    ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern=.*: must be ranks by regular expression"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern=.*: must be numbers by regular expression"),
    ({"target_modules": "q_proj("}, "target_modules=.*: must be a regular expression or a list"),
    ({"target_modules": [1]}, "target_modules=.*: must be a regular expression or a list"),
    ({"layers_to_transform": "all"}, "layers_to_transform='all': must be a layer or a list of layers"),
    ({"layers_pattern": ["("]}, "layers_pattern=.*: must be the name of a list of layers"),
    ({"use_rslora": "yes"}, "use_rslora='yes': must be true or false"),
    ({"r": 8}, rf"{Q} has lora_A \[4, 32\] and lora_B \[32, 4\], where \[8, 32\] and \[32, 8\] fit"),
    ({"target_modules": ["k_proj"]}, f"{Q} has tensors, but is no target of adapter_config.json"),
    ({"layers_to_transform": [1]}, f"{Q} has tensors, but is no target"),
    ({"target_modules": ["q_proj", "o_proj"]}, "layers.0.self_attn.o_proj is a target of .* and has no tensors"),
]
TENSORS = [
    (lambda found: found.pop(B), f"{Q} has lora_A alone"),
    (lambda found: found.pop(A), f"{Q} has lora_B alone"),
    (lambda found: (found.pop(A), found.pop(B)), f"{Q} is a target of adapter_config.json and has no tensors"),
    (lambda found: found.clear(), "adapter_model.safetensors has no tensors"),
    (lambda found: found.update({A: found[A][:, :-1].clone()}), rf"{Q} has lora_A \[4, 31\]"),
    (
        lambda found: found.update({A: found[A][0].clone()}),
        r"lora_A.weight must be a matrix of floats, got float64 \[32",
    ),
    (lambda found: found.update({B: found[B].int()}), "lora_B.weight must be a matrix of floats, got int32"),
    (lambda found: found[B].__setitem__((3, 1), float("nan")), f"{Q} has values that are not finite in torch.float64"),
    (
        lambda found: found.update({"base_model.model.x.lora_magnitude_vector": found[A].clone()}),
        "x.lora_magnitude_vector: only",
    ),
    (
        lambda found: found.update({"model.x.lora_A.weight": found[A].clone()}),
        "model.x.lora_A.weight: only lora_A and lora_B",
    ),
]


def refused(adapters: Adapters, folder: Path, message: str) -> None:
    """It is refused with the folder's name, and nothing has changed."""
    with pytest.raises(AdapterError, match=message) as error:
        adapters.load("a", folder)
    assert str(error.value).startswith(f"adapter {folder}: ")
    assert adapters.names() == {}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Adapters, Path]:
    model = model_of("llama")
    folder = adapter(tmp_path_factory.mktemp("adapter") / "a", model)
    adapters = Adapters(model, 1, 8)
    adapters.read(folder)
    return adapters, folder


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


@pytest.mark.parametrize(("change", "message"), CONFIGS, ids=[f"{change}" for change, _ in CONFIGS])
def test_a_config_that_is_refused(llama, tmp_path, change, message):
    """What the engine cannot do is refused by field, value and reason; so is what does not agree with the tensors.

    Mutation: any line of `_REFUSED`, `_FIELDS`, `config_of` or `fitted` is left out.
    """
    adapters, folder = llama
    folder = rewrite(copied(folder, tmp_path / "a"), lambda config: config.update(change))
    refused(adapters, folder, message)


@pytest.mark.parametrize(("change", "message"), TENSORS, ids=[message for _, message in TENSORS])
def test_tensors_that_are_refused(llama, tmp_path, change, message):
    """Every tensor must be one half of a pair that fits a module, and every target must have a pair.

    Mutation: `pairs_of` passes over what it does not know; `_host_copy` does not look at the values.
    """
    adapters, folder = llama
    refused(adapters, rewrite(copied(folder, tmp_path / "a"), tensors=change), message)


def test_files_that_are_missing_or_broken(llama, tmp_path):
    """A clear error names the file. A pickle is never read.

    Mutation: `Folder.open` says of a pickle that it is missing; `config_of` takes a list for an object.
    """
    adapters, whole = llama
    config, tensors = "adapter_config.json", "adapter_model.safetensors"
    refused(adapters, tmp_path / "none", "no such folder")
    folder = copied(whole, tmp_path / "a")
    (folder / tensors).write_bytes((whole / tensors).read_bytes()[:-1])
    refused(adapters, folder, f"{tensors} is broken")
    (folder / tensors).write_bytes(b"")
    refused(adapters, folder, f"{tensors} is broken")
    (folder / tensors).unlink()
    refused(adapters, folder, f"{tensors} is missing")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    refused(adapters, folder, "adapter_model.bin is refused, since reading a pickle can run code")
    (folder / config).write_text("{")
    refused(adapters, folder, f"{config} is not JSON")
    (folder / config).write_text("[]")
    refused(adapters, folder, f"{config} must be an object")
    (folder / config).unlink()
    refused(adapters, folder, f"{config} is missing")
    (folder / config).mkdir()
    refused(adapters, folder, f"{config} cannot be read")


def test_an_adapter_for_another_model(tmp_path):
    """The first module that does not fit is named: other widths, more layers, fewer layers, other names; a rank above
    the highest; modules that adapters cannot change.

    Mutation: `fitted` leaves out what is not in `linears`, or does not compare the ranks; `Adapters` wraps the output
    layer.
    """
    model = model_of("llama")
    others = {
        "wide": model_of("llama", hidden_size=64),
        "deep": model_of("llama", num_hidden_layers=3),
        "flat": model_of("llama", num_hidden_layers=1),
    }
    adapters = Adapters(model, 1, 8)
    options = {
        "wide": ({}, rf"{Q} has lora_A \[4, 64\] and lora_B \[64, 4\], where \[4, 32\] and \[32, 4\] fit"),
        "deep": ({}, "model.layers.2.self_attn.q_proj is not in this model: the adapter is for another one"),
        "flat": ({}, "model.layers.1.self_attn.q_proj is a target of adapter_config.json and has no tensors"),
        "rank": (
            {"rank_pattern": {"1.self_attn.q_proj": 9}},
            "layers.1.self_attn.q_proj has rank 9, above max_lora_rank 8",
        ),
        "head": ({"target_modules": ["lm_head"]}, "lm_head is the output layer: adapters there are not supported"),
        "words": ({"target_modules": ["embed_tokens"]}, "embed_tokens.*only lora_A and lora_B of nn.Linear"),
    }
    for name, (option, message) in options.items():
        folder = adapter(tmp_path / name, others.get(name) or model_of("llama"), **option)
        if name == "head":  # a copy of the layer itself lies beside its pair, and would be refused first
            refused(adapters, folder, "lm_head.base_layer.weight: only lora_A and lora_B of nn.Linear")
            rewrite(folder, tensors=lambda found: found.pop("base_model.model.lm_head.base_layer.weight"))
        refused(adapters, folder, message)


def test_experts_are_refused_and_the_rest_of_a_mixture_is_right(tmp_path):
    """Fused experts are no linear layers, and an expert of its own sees some tokens only; attention takes adapters as
    in any model.

    Mutation: `in_expert` is always false.
    """
    model = model_of("moe")
    model.set_experts_implementation("eager")
    folder = adapter(tmp_path / "a", model, target_modules=["q_proj", "v_proj"])
    expected = alone(model, folder, [1, 2, 3])
    experts = copied(folder, tmp_path / "experts")
    router = copied(folder, tmp_path / "router")
    for where, name in ((experts, "experts.0.gate_proj"), (router, "gate")):
        rewrite(where, lambda config: config.update(target_modules=None))
        add = {f"base_model.model.model.layers.0.mlp.{name}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
        rewrite(where, tensors=lambda found, add=add: found.update(add))

    adapters = Adapters(model, 1, 8)
    refused(adapters, experts, r"mlp.experts.0.gate_proj is an expert of its own in the adapter.*experts are fused")
    refused(adapters, router, r"mlp.gate is a \w+: adapters on what is not nn.Linear are not supported")
    with adapters.applied(adapters.begin([adapters.load("a", folder)], [3])):
        assert close(alone(model, None, [1, 2, 3]), expected)

    class Old(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linears = {"gate_proj": torch.nn.Linear(4, 4), "experts": torch.nn.ModuleList([torch.nn.Linear(4, 4)])}
            self.mlp = torch.nn.ModuleDict(linears)

    old = copied(folder, tmp_path / "old")
    rewrite(old, lambda config: config.update(target_modules=None))
    add = {f"base_model.model.mlp.experts.0.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    rewrite(old, tensors=lambda found: (found.clear(), found.update(add)))
    refused(Adapters(Old(), 1, 4), old, "mlp.experts.0 is an expert, which sees some tokens only")
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        Adapters(torch.nn.ModuleDict({"words": torch.nn.Embedding(4, 4)}), 1, 4)
