"""Rewrites one function of HIVM IR as a Python function of its scalar part; see `hivm_counts`."""

import re
from collections.abc import Sequence
from math import prod

BINARY = {
    "addi": "+", "subi": "-", "muli": "*", "divsi": "//", "remsi": "%", "ori": "|", "andi": "&", "xori": "^",
}  # fmt: skip
COMPARE = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
SAME_VALUE = ("extsi", "extui", "trunci", "index_cast", "index_castui")
SAME_PLACE = ("cast", "collapse_shape", "expand_shape")
VALUE = r"%[\w#-]+"
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8, "i32": 4, "i8": 1, "i1": 0.125}


def translate(lines: Sequence[str]) -> str:
    """Source of `run(arguments, counts, tables, program, sub_block)`.

    Raises:
        ValueError: an operation that is not known here.
    """
    arguments = re.findall(r"(%arg\d+): ", lines[0])
    out = ["def run(arguments, counts, tables, program, sub_block):"]
    out.append(f"    ({', '.join(map(_name, arguments))},) = arguments")
    nest: list[tuple[str, list[str], list[str]]] = []
    for line in map(str.strip, lines[1:]):
        indent = "    " * (len(nest) + 1)
        if line.startswith("}"):
            _, results, carried = nest.pop()
            out.append(f"{indent}pass")
            if results:
                out.append(f"{indent[4:]}{', '.join(results)} = {', '.join(carried)}")
            if line.startswith("} else"):
                out.append(f"{indent[4:]}else:")
                nest.append(("if", [], []))
        elif line.startswith("return"):
            break
        elif loop := re.match(rf"(?:({VALUE})(?::\d+)? = )?scf\.for ({VALUE}) = (\S+) to (\S+) step (\S+)(.*)", line):
            result, index, start, stop, step, rest = loop.groups()
            pairs = re.findall(rf"({VALUE}) = ({VALUE})", rest)
            carried = [_name(inner) for inner, _ in pairs]
            out += [f"{indent}{_name(inner)} = {_name(outer)}" for inner, outer in pairs]
            out.append(f"{indent}for {_name(index)} in range({', '.join(map(_name, (start, stop, step)))}):")
            many = len(pairs) > 1
            results = [_name(f"{result}#{i}" if many else result) for i in range(len(pairs))] if result else []
            nest.append(("for", results, carried))
        elif condition := re.match(rf"scf\.if ({VALUE})", line):
            out.append(f"{indent}if {_name(condition[1])}:")
            nest.append(("if", [], []))
        elif line.startswith("scf.yield"):
            values = re.findall(VALUE, line.split(" : ")[0])
            out.append(f"{indent}{', '.join(nest[-1][2])} = {', '.join(map(_name, values))}")
        elif statement := _statement(line):
            out.append(indent + statement)
    return "\n".join(out)


def _statement(line: str) -> str:
    """One operation without a region; empty if it neither computes a scalar nor moves or computes a tensor."""
    if call := re.match(r"(?:func\.)?call @(\w+)\((.*?)\) : \((.*)\) -> ", line):
        return _call(call[1], call[2].split(", "), re.findall(r"memref<.*?>>|\w+", call[3]))
    if assigned := re.match(rf"({VALUE}) = (.*)", line):
        return f"{_name(assigned[1])} = {_expression(assigned[2])}"
    if not line.startswith("hivm.hir."):
        raise ValueError(f"cannot follow {line}")
    return ""


def _expression(operation: str) -> str:
    kind, _, rest = operation.partition(" ")
    dialect, _, verb = kind.partition(".")
    values = [_name(value) for value in re.findall(VALUE, rest.split(" : ")[0])]
    match dialect, verb:
        case "arith", "constant":
            literal = rest.split(" ")[0]
            return {"true": "True", "false": "False"}.get(literal, literal if literal[-1].isdigit() else "0.0")
        case "arith", "cmpi":
            return f"{values[0]} {COMPARE[rest.split(',')[0]]} {values[1]}"
        case "arith", "select" if "memref" in rest:
            return f"{values[1]}._replace(is_double=True)"
        case "arith", "select":
            return f"{values[1]} if {values[0]} else {values[2]}"
        case "arith", "maxsi" | "minsi":
            return f"{verb[:3]}({', '.join(values)})"
        case ("arith", _) if verb in BINARY:
            return f"{values[0]} {BINARY[verb]} {values[1]}"
        case ("arith", _) if verb in SAME_VALUE:
            return f"int({values[0]})"
        case "affine", "apply" | "min" | "max":
            choose = {"apply": "", "min": "min", "max": "max"}[verb]
            applied = f"maps['{rest.split('(')[0]}']({', '.join(values)})"
            return f"{choose}({applied})" if choose else f"{applied}[0]"
        case "memref", "load":
            return f"tables[{values[0]}.owner][{values[0]}.offset + {values[1]}]"
        case "memref", "reinterpret_cast":
            offset, sizes = re.search(r"offset: \[(.*?)\], sizes: \[(.*?)\]", rest).groups()  # type: ignore[union-attr]
            return f"Ref({values[0]}.owner, {_product(sizes)}, {_name(offset)})"
        case "memref", "subview":
            sizes = re.match(rf"{VALUE}\[.*?\] \[(.*?)\]", rest)[1]  # type: ignore[index]
            return f"{values[0]}._replace(size={_product(sizes)})"
        case "memref", "view":
            return f"{values[0]}._replace(size={_static_size(rest.rpartition('to ')[2])})"
        case ("memref", _) if verb in SAME_PLACE:
            return values[0]
        case "hivm", _ if verb.startswith("hir.pointer_cast"):
            return f"Ref('buffer', {_static_size(operation)})"
        case "hivm", "hir.get_block_idx":
            return "program"
        case "hivm", "hir.get_sub_block_idx":
            return "sub_block"
    raise ValueError(f"cannot follow {operation}")


def _call(name: str, arguments: list[str], types: list[str]) -> str:
    values = [_name(argument) for argument in arguments]
    if name.startswith("mma_tile"):
        return f"counts.multiply({', '.join(values[3:6])})"
    if name.startswith("set_l1"):
        return ""
    outside = [kind for kind in types if "space<gm>" in kind]
    if outside:
        element = ELEMENT_BYTES[re.search(r"x(\w+),", outside[0])[1]]  # type: ignore[index]
        tensors = [value for value, kind in zip(values, types, strict=False) if kind.startswith("memref")]
        return f"counts.move({'space<gm>' in types[0]}, {tensors[0]}, {tensors[1]}, {element})"
    sizes = [f"{value}.size" for value, kind in zip(values, types, strict=False) if kind.startswith("memref")]
    return f"counts.compute({', '.join(sizes)})"


def _name(value: str) -> str:
    """A value of the IR as a Python name; a literal as it is."""
    return re.sub(r"\W", "_", value.replace("-", "minus").replace("%", "v_")) if value.startswith("%") else value


def _product(sizes: str) -> str:
    return " * ".join(map(_name, sizes.split(", ")))


def _static_size(text: str) -> int:
    return prod(int(size) for size in re.search(r"memref<((?:\d+x)+)", text)[1].split("x")[:-1])  # type: ignore[index]
