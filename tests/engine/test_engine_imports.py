"""The engine and its tests need neither torch nor Ray, so they run anywhere in seconds."""

import ast
import subprocess
import sys
from pathlib import Path

HEAVY = {"torch", "ray", "transformers", "safetensors"}

IMPORT_ALL = """
import importlib, pkgutil, sys
import ray_lora.engine
names = [module.name for module in pkgutil.iter_modules(ray_lora.engine.__path__, "ray_lora.engine.")]
nouns = [f"ray_lora.{noun}" for noun in ("adapter", "architecture", "config", "errors", "request", "stats", "step")]
assert len(names) >= 8, names
for name in names + nouns:
    importlib.import_module(name)
print(sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_importing_the_engine_loads_neither_torch_nor_ray() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    assert not HEAVY & set(ast.literal_eval(done.stdout))


def test_the_engines_tests_import_neither_torch_nor_ray() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not HEAVY & {name.split(".")[0] for name in names}, path
