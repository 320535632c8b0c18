"""Every kernel that can be launched, through the Ascend compiler: it fits, with double buffers, on every target."""

import re

import pytest
from ascend_compile import A5, TARGETS, AscendCompileError, compile_for_ascend
from hivm_counts import buffer_bytes
from launch import Specialization, served, specialize
from served_layers import Layer, served_layers

from ray_lora.backends.lora_blocks import Blocks

LAYERS = served_layers()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", served("npu"), ids=str)
def test_a_kernel_fits_with_double_buffers(spec: Specialization, target: str) -> None:
    compiled = compile_for_ascend(spec, TARGETS[target])
    assert not compiled.retried, compiled.log
    assert re.search(r"arith\.select .* : memref<", compiled.ir), "no load has two buffers"
    limits = {name: int(bits) // 8 for name, bits in re.findall(r'"(UB|L1|L0C)_SIZE", (\d+)', compiled.ir)}
    used = buffer_bytes(compiled.ir)
    assert all(used[name] <= limits[name] for name in ("UB", "L1", "L0C")), (used, limits)


@pytest.mark.parametrize(("label", "layer"), LAYERS, ids=[label for label, _ in LAYERS])
def test_a_served_layer_takes_the_kernels_compiled_here(label: str, layer: Layer) -> None:
    """Sizes are arguments; Triton compiles anew only for one that is not a multiple of 16, or needs 64 bits."""
    sizes = (layer.in_features, layer.out_features)
    assert all(size % 16 == 0 for size in sizes), label
    assert 16 * max(sizes) < 2**31, label


def test_the_compiler_says_when_double_buffers_do_not_fit() -> None:
    """It then compiles with single ones and ends well: the check above would miss nothing."""
    spec = Specialization("decode", "npu", "fp32", 1, Blocks(4, 1024, 512))
    compiled = compile_for_ascend(spec, TARGETS["A2"])
    assert compiled.retried
    assert not re.search(r"arith\.select .* : memref<", compiled.ir)


def test_what_does_not_fit_at_all_is_refused() -> None:
    spec = Specialization("decode", "npu", "bf16", 1, Blocks(4, 2048, 2048))
    with pytest.raises(AscendCompileError, match="Ub overflow"):
        compile_for_ascend(spec, TARGETS["A2"])


ASSERTION = pytest.mark.xfail(
    raises=AscendCompileError, strict=True, reason="bishengir-compile-a5 1.2.0 ends in an assertion of its own"
)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("decode", "bf16"),
        ("decode", "fp16"),
        ("prefill", "fp16"),
        pytest.param("prefill", "bf16", marks=ASSERTION),
    ],
)
def test_a_kernel_compiles_for_ascend950(form: str, dtype: str) -> None:
    assert not compile_for_ascend(specialize(form, "npu", dtype, 4), A5).retried
