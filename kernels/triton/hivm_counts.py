"""Counts what a compiled kernel does, by running the scalar part of its final IR with a launch's own arguments.

Every loop bound, size and address of `module.hivm.opt.mlir` is scalar code. It is rewritten as Python, line by line;
the calls that move or compute tensors become counts of bytes and elements.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from hivm_python import ELEMENT_BYTES, translate

BUFFERS = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}


class Ref(NamedTuple):
    """A memref: which argument or buffer it lies in, how many elements it spans, where it starts."""

    owner: str
    size: int
    offset: int = 0
    is_double: bool = False
    """One of two buffers that take turns."""


@dataclass
class Counts:
    """What one launch does. Bytes of global memory are counted by the argument that they belong to."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    single_buffered: Counter[str] = field(default_factory=Counter)
    """Bytes that are read where nothing is computed meanwhile, again by argument."""
    cube_macs: int = 0
    """Multiply-adds of the cube units, their operands rounded up to 16 x 16."""
    vector_elements: int = 0
    """Elements that vector instructions read or write, whichever is more."""
    busiest_bytes: float = 0
    """Most that one program moves."""

    @property
    def num_bytes(self) -> float:
        return self.read.total() + self.written.total()

    def move(self, is_read: bool, source: Ref, target: Ref, element: float) -> None:
        outside = source if is_read else target
        (self.read if is_read else self.written)[outside.owner] += outside.size * element
        if is_read and not target.is_double:
            self.single_buffered[outside.owner] += outside.size * element

    def compute(self, *sizes: int) -> None:
        self.vector_elements += max(sizes)

    def multiply(self, m: int, k: int, n: int) -> None:
        self.cube_macs += prod(-(-side // 16) * 16 for side in (m, k, n))


def count_launch(ir: str, arguments: dict[str, Any], num_programs: int) -> Counts:
    """Run every program of a launch.

    Args:
        arguments: the kernel's, in order; tables as lists, other tensors as None.
    """
    counts = Counts()
    tables = {name: value for name, value in arguments.items() if isinstance(value, list)}
    values = [Ref(name, 0) if value is None or name in tables else value for name, value in arguments.items()]
    run = [compile_function(lines, maps_of(ir)) for lines in device_functions(ir)]
    for program in range(num_programs):
        before = counts.num_bytes
        for function, cores in run:
            for sub_block in range(cores):
                arguments_ = (0, Ref("lock", 0), Ref("workspace", 0), *values, num_programs, 1, 1)
                function(arguments_, counts, tables, program, sub_block)
        counts.busiest_bytes = max(counts.busiest_bytes, counts.num_bytes - before)
    return counts


def buffer_bytes(ir: str) -> dict[str, int]:
    """How far each on-chip buffer is filled."""
    constants = dict(re.findall(r"(%c\S+) = arith.constant (\d+) : i64", ir))
    used = dict.fromkeys(BUFFERS.values(), 0)
    for address, kind, space in re.findall(r"pointer_cast\((\S+)\) : memref<(\S+), #hivm.address_space<(\w+)>>", ir):
        end = int(constants[address]) + int(prod(_dimensions(kind)) * ELEMENT_BYTES[kind.split("x")[-1]])
        used[BUFFERS[space]] = max(used[BUFFERS[space]], end)
    return used


def device_functions(ir: str) -> list[list[str]]:
    """The lines of each function that runs on the device."""
    found = []
    for body in re.split(r"\n  (?=func\.func )", ir)[1:]:
        lines = body.split("\n  }\n")[0].splitlines()
        if "hacc.entry" in lines[0] and "DEVICE" in lines[0]:
            found.append(lines)
    return found


def maps_of(ir: str) -> dict[str, Callable[..., tuple[int, ...]]]:
    """Affine maps as Python functions that return a tuple."""
    maps = {}
    for name, dims, symbols, body in re.findall(r"^(#\w+) = affine_map<\((.*?)\)(?:\[(.*?)\])? -> \((.*)\)>", ir, re.M):
        body = re.sub(r"(\([^()]*\)|\w+) ceildiv (\w+)", r"(-(-\1 // \2))", body)
        body = body.replace("floordiv", "//").replace("mod", "%")
        maps[name] = eval(f"lambda {', '.join(filter(None, (dims, symbols)))}: ({body},)")
    return maps


def compile_function(
    lines: Sequence[str], maps: dict[str, Callable[..., tuple[int, ...]]]
) -> tuple[Callable[..., None], int]:
    """The function as Python, and how many cores run it for one program: two vector cores serve a cube core."""
    namespace: dict[str, Any] = {"maps": maps, "Ref": Ref, "prod": prod}
    exec(translate(lines), namespace)
    is_vector_half = "_mix_aiv(" in lines[0]
    return namespace["run"], 2 if is_vector_half else 1


def _dimensions(kind: str) -> list[int]:
    return [int(size) for size in kind.split("x")[:-1]]
