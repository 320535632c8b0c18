"""Builds the CPU kernels. Everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

KERNELS = Path("kernels/cpu")

# A plain C library that ctypes loads, not a Python module. No -march: the library chooses the instruction set when it
# runs. Optional: without a compiler the install succeeds, and the references serve.
cpu_kernels = Extension(
    "ray_lora.backends._cpu_kernels",
    sources=sorted(map(str, KERNELS.glob("*.cpp"))),
    depends=sorted(map(str, KERNELS.glob("*.h"))),
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-pthread",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=off",
        "-Wall",
        "-Wno-psabi",
        "-Wno-ignored-attributes",
        "-Wno-uninitialized",  # GCC 12 warns of its own intrinsics
        "-Wno-maybe-uninitialized",
    ],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)

setup(ext_modules=[cpu_kernels])
