"""What is published about the chips, for the floors of `npu_report.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """One die. Peak rates: what a kernel reaches is less, so times made of them are floors."""

    name: str
    cube_cores: int
    vector_cores: int
    """Both as `bishengir-compile` writes into a module's header for the target."""
    clock_hz: float = 1.8e9
    bandwidth: float = 1.6e12
    """Bytes per second between HBM and the cores; 64 GB of HBM2e."""
    cube_macs: int = 16 * 16 * 16
    """Multiply-adds of one cube core in a cycle, on half types. 910B3: 20 * 4096 * 2 * 1.8e9 = 295 TFLOPS, as published
    (313 at the boost clock)."""
    vector_lanes: int = 64
    """float32 elements that one vector core takes in a cycle: 256 bytes."""

    @property
    def cube_rate(self) -> float:
        return self.cube_cores * self.cube_macs * self.clock_hz

    @property
    def vector_rate(self) -> float:
        return self.vector_cores * self.vector_lanes * self.clock_hz


CHIPS = {"A2": Chip("Ascend910B3", 20, 40), "A3": Chip("Ascend910_9382, one die", 24, 48)}
