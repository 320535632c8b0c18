"""The layout of ray_lora as rules read from its source: who may import whom, how files are named, how long they are."""

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ray_lora"
MAX_LINES = 320

MAY_NOT_IMPORT: dict[str, tuple[str, ...]] = {
    "serve": ("torch", "ray_lora.model", "ray_lora.backends", "ray_lora.ops", "ray_lora.adapters"),
    "engine": (
        "torch",
        "ray",
        "ray_lora.serve",
        "ray_lora.cluster",
        "ray_lora.model",
        "ray_lora.adapters",
        "ray_lora.backends",
        "ray_lora.ops",
    ),
    "cluster": ("ray.serve", "ray_lora.serve", "ray_lora.engine"),
    "model": ("ray", "ray_lora.serve", "ray_lora.engine", "ray_lora.cluster"),
    "backends": ("ray", "ray_lora.serve", "ray_lora.engine", "ray_lora.cluster", "ray_lora.model"),
    "ops": ("ray", "ray_lora.serve", "ray_lora.engine", "ray_lora.cluster", "ray_lora.model", "ray_lora.backends"),
    "adapters": (
        "ray",
        "ray_lora.serve",
        "ray_lora.engine",
        "ray_lora.cluster",
        "ray_lora.model",
        "ray_lora.ops",
        "ray_lora.backends",
    ),
}
"""By folder, on top of `torch_npu`, which `backends/npu.py` alone may import."""
TORCH_NPU_FILE = "backends/npu.py"

ENTRY_FILES = ("__init__.py", "__main__.py", "llm.py")
"""Files of the root that may import anything of ours; the others are the nouns."""
MAY_ALSO_IMPORT = {"config.py": ("pydantic",), "tenant.py": ("pydantic",), "__main__.py": ("click",)}


def imports(path: Path) -> Iterator[str]:
    """Every module or name that a file imports, wherever in the file, with its full dotted name."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                prefix = "." * node.level + (f"{node.module}." if node.module else "")
                yield from (prefix + alias.name for alias in node.names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def import_violations(package: Path) -> list[str]:
    """One line for each import that breaks a rule."""
    nouns = {path.stem for path in package.glob("*.py") if path.name not in ENTRY_FILES}
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        for name in imports(path):
            if name.startswith("."):
                found.append(f"{file} imports {name}: relative imports hide the direction of an import")
            elif not _may_import(file, name, nouns):
                found.append(f"{file} imports {name}")
    return found


def _may_import(file: Path, name: str, nouns: set[str]) -> bool:
    if is_within(name, "torch_npu"):
        return file.as_posix() == TORCH_NPU_FILE
    if len(file.parts) > 1:
        return not any(is_within(name, banned) for banned in MAY_NOT_IMPORT[file.parts[0]])
    top = name.split(".")[0]
    if top == "ray_lora":
        return file.name in ENTRY_FILES or name.split(".")[1:2] in [[noun] for noun in nouns]
    return top in sys.stdlib_module_names or top in MAY_ALSO_IMPORT.get(file.name, ())


def name_violations(package: Path) -> list[str]:
    """One line for each file whose name says nothing, or is taken."""
    paths = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        paths[path.name].append(path.relative_to(package).as_posix())
    twice = [f"{name} is the name of {' and '.join(files)}" for name, files in paths.items() if len(files) > 1]
    drawers = [f"{path.relative_to(package)} says nothing" for path in package.rglob("utils*") if path.stem == "utils"]
    return [line for line in twice if not line.startswith("__init__.py ")] + drawers


def size_violations(package: Path) -> list[str]:
    """One line for each file that is too long to read in one go."""
    lengths = {path.relative_to(package): len(path.read_text().splitlines()) for path in sorted(package.rglob("*.py"))}
    return [f"{file} has {length} lines" for file, length in lengths.items() if length > MAX_LINES]


def test_every_file_imports_only_what_its_folder_may() -> None:
    assert import_violations(PACKAGE) == []


def test_every_folder_has_a_rule() -> None:
    folders = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert folders <= set(MAY_NOT_IMPORT)


def test_file_names_are_unique_and_say_something() -> None:
    assert name_violations(PACKAGE) == []


def test_no_file_is_long() -> None:
    assert size_violations(PACKAGE) == []


def test_the_kernels_folder_cannot_be_imported_as_the_package_of_that_name() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


PLANTED = [
    ("serve/replica.py", "import torch", "serve/replica.py imports torch"),
    ("serve/replica.py", "from ray_lora.adapters.store import AdapterStore", "imports ray_lora.adapters.store"),
    ("serve/replica.py", "from ray_lora import ops", "serve/replica.py imports ray_lora.ops"),
    ("engine/policy.py", "import torch.nn", "engine/policy.py imports torch.nn"),
    ("engine/policy.py", "def f():\n    import ray", "engine/policy.py imports ray"),
    ("engine/policy.py", "from importlib import import_module\nimport_module('torch')", "imports torch"),
    ("engine/policy.py", "import importlib\nimportlib.import_module('ray.dag')", "engine/policy.py imports ray.dag"),
    ("engine/policy.py", "from ray_lora.cluster.local import LocalExecutor", "imports ray_lora.cluster.local"),
    ("engine/policy.py", "from ray_lora.adapters import names", "engine/policy.py imports ray_lora.adapters.names"),
    ("cluster/start.py", "from ray import serve", "cluster/start.py imports ray.serve"),
    ("cluster/start.py", "import ray_lora.engine.scheduler", "cluster/start.py imports ray_lora.engine.scheduler"),
    ("cluster/start.py", "import torch_npu", "cluster/start.py imports torch_npu"),
    ("model/llama.py", "import ray", "model/llama.py imports ray"),
    ("model/llama.py", "from ray_lora.engine import scheduler", "model/llama.py imports ray_lora.engine.scheduler"),
    ("backends/cuda.py", "import torch_npu", "backends/cuda.py imports torch_npu"),
    ("backends/cuda.py", "import ray_lora.model.llama", "backends/cuda.py imports ray_lora.model.llama"),
    ("ops/lora.py", "from ray_lora.backends.base import Backend", "imports ray_lora.backends.base.Backend"),
    ("ops/lora.py", "from torch_npu import npu", "ops/lora.py imports torch_npu.npu"),
    ("adapters/store.py", "from ray_lora.ops.lora import Segments", "imports ray_lora.ops.lora.Segments"),
    ("adapters/store.py", "from ray_lora.model import batch", "adapters/store.py imports ray_lora.model.batch"),
    ("engine/policy.py", "from . import scheduler", "engine/policy.py imports .scheduler: relative"),
    ("engine/policy.py", "from ..step import StepPlan", "engine/policy.py imports ..step.StepPlan: relative"),
    ("step.py", "import torch", "step.py imports torch"),
    ("step.py", "import pydantic", "step.py imports pydantic"),
    ("step.py", "from ray_lora.engine.scheduler import Scheduler", "step.py imports ray_lora.engine"),
    ("step.py", "from ray_lora import engine", "step.py imports ray_lora.engine"),
    ("step.py", "import ray_lora", "step.py imports ray_lora"),
    ("config.py", "import yaml", "config.py imports yaml"),
    ("llm.py", "import torch", "llm.py imports torch"),
]


@pytest.mark.parametrize(("file", "source", "violation"), PLANTED)
def test_a_planted_import_is_found(tmp_path: Path, file: str, source: str, violation: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    found = import_violations(tmp_path)
    assert any(violation in line for line in found), found


ALLOWED = [
    ("serve/replica.py", "import ray.serve\nimport torchlike\nfrom ray_lora.engine.scheduler import Scheduler"),
    ("engine/policy.py", "import rayon\nimport asyncio\nfrom ray_lora.step import StepPlan"),
    ("cluster/start.py", "import ray\nimport torch\nfrom ray_lora.model.llama import Decoder"),
    ("model/llama.py", "import torch\nfrom ray_lora.ops.lora import Segments"),
    ("backends/npu.py", "import torch_npu"),
    ("config.py", "import pydantic\nfrom ray_lora.adapter import num_pages\nimport ray_lora.errors"),
    ("llm.py", "import asyncio\nfrom ray_lora.cluster.launch import start"),
    ("__init__.py", "from ray_lora.llm import LLM\nfrom ray_lora import engine"),
]


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_an_allowed_import_is_let_through(tmp_path: Path, file: str, source: str) -> None:
    for noun in ("adapter.py", "errors.py", "step.py"):
        (tmp_path / noun).touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    assert import_violations(tmp_path) == []


@pytest.mark.parametrize(
    ("files", "check", "violations"),
    [
        (("ops/utils.py",), name_violations, ["ops/utils.py says nothing"]),
        (("ops/utils/x.py",), name_violations, ["ops/utils says nothing"]),
        (("ops/lora.py", "model/lora.py"), name_violations, ["lora.py is the name of model/lora.py and ops/lora.py"]),
        (("ops/__init__.py", "model/__init__.py"), name_violations, []),
        (("ops/lora.py",), size_violations, ["ops/lora.py has 321 lines"]),
    ],
)
def test_a_planted_file_is_found(
    tmp_path: Path, files: tuple[str, ...], check: Callable[[Path], list[str]], violations: list[str]
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("\n" * (MAX_LINES + 1))
    assert check(tmp_path) == violations
