"""The demo model and its adapters behind a real `serve run`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import serving

MODEL = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
ADAPTERS = Path(__file__).parents[2] / "deployments" / "adapters"
NAMES = tuple(sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json")))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of the running server."""
    directory = tmp_path_factory.mktemp("server")
    with serving(
        directory,
        model=str(MODEL),
        served_model_name="smollm2",
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 28,
        max_lora_pages=6,
        max_loras=6,
        lora_modules={name: str(ADAPTERS / name) for name in NAMES},
        adapter_store_dir=str(directory / "store"),
    ) as url:
        yield url
