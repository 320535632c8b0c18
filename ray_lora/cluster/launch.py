"""From a configuration to running ranks."""

from typing import TYPE_CHECKING

from ray_lora.architecture import read_architecture
from ray_lora.cluster.local import LocalExecutor
from ray_lora.config import EngineConfig

if TYPE_CHECKING:
    from ray_lora.cluster.ray_tp import RayTPExecutor


def prepare_cluster(config: EngineConfig) -> None:
    """Connect to Ray if the ranks need it; see `require_ray` for the thread to call this from."""
    if config.uses_ray:
        from ray_lora.cluster.ray_tp import require_ray

        require_ray()


def start_executor(config: EngineConfig) -> "LocalExecutor | RayTPExecutor":
    """Start the ranks and load the model. Blocks. Ray is imported only if it is used.

    Raises:
        ConfigError: the model cannot be served as configured.
    """
    read_architecture(config.model_path).check_tensor_parallel(config.tensor_parallel_size)
    if not config.uses_ray:
        return LocalExecutor(config)
    from ray_lora.cluster.ray_tp import RayTPExecutor

    return RayTPExecutor(config)
