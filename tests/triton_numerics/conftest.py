"""Run by `make test-npu-compile`, with TRITON_INTERPRET=1: both Triton kernels, on CPU tensors.

Elsewhere nothing here is collected: the interpreter is chosen when triton is imported, and needs its environment.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_lora.ops.lora import Segments

IS_CHOSEN = os.environ.get("TRITON_INTERPRET") == "1"
FORMS = ("decode", "prefill") if IS_CHOSEN else ()
collect_ignore_glob = [] if IS_CHOSEN else [str(Path(__file__).parent / "test_*.py")]


class OneForm:
    """`add_lora_` with every row taken by one kernel, whatever its sequence's length."""

    def __init__(self, target: str, form: str) -> None:
        from ray_lora.backends.triton_lora import TritonLora

        self._kernels = TritonLora(target, decode_programs=5, prefill_programs=3)
        self._is_prefill = form == "prefill"

    def add_lora_(
        self, y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
    ) -> None:
        query_starts: Sequence[int] | None = [0, x.shape[0]] if self._is_prefill else None
        self._kernels.add_lora_(y, x, pool_a, pool_b, slices, self._kernels.plan(segments, query_starts))


@pytest.fixture(params=FORMS)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OneForm:
    monkeypatch.setattr("ray_lora.backends.lora_plan.MIN_CHUNK", 1)
    return OneForm("npu", request.param)


@pytest.fixture
def native(ops: OneForm) -> OneForm:
    return ops


@pytest.fixture(autouse=True)
def _multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as 16-bit integers and would multiply these; float32 holds them exactly."""
    from triton.runtime import interpreter

    create_dot: Callable[..., Any] = interpreter.InterpreterBuilder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar.is_bf16():
            bits = torch.from_numpy(handle.data.astype("int32")) << 16
            return interpreter.TensorHandle(bits.view(torch.float32).numpy(), handle.dtype)
        return handle

    def create_dot_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot_widened)
