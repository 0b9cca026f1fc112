"""What an image says of itself: its parameters, its instructions, and the width of its address arithmetic.

Read from the object and from the compiler's text, never from what was asked for: the build compares the two, and the
tests read the objects again.
"""

import io
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping

from build_tools import BuildError

# EIATTR_KPARAM_INFO in a cubin's .nv.info.<kernel>: index u32, ordinal u16, offset u16, then the size in bits 18..31.
KERNEL_PARAMETER = 0x17
WITH_PAYLOAD = 4  # format of the .nv.info entries whose 16-bit field is the length of a payload

MATRIX = re.compile(r"HMMA|HGMMA|UTC\w*MMA|v_mfma_\w+|v_wmma_\w+")
TENSOR_MEMORY = re.compile(r"UTC\w*|LDTM|STTM")
GATHER = re.compile(r"LDGSTS|LDG|global_load_\w+|buffer_(?:load|store|atomic)_\w+")
SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
AMD_INSTRUCTION = re.compile(r"^\s+([a-z]+_\w+)", re.MULTILINE)


def cubin_parameters(image: bytes) -> list[tuple[int, int]]:
    """(offset, size) in bytes of a cubin's kernel parameters, in order."""
    from elftools.elf.elffile import ELFFile

    found = {}
    for section in ELFFile(io.BytesIO(image)).iter_sections():
        if not section.name.startswith(".nv.info."):
            continue
        data, at = section.data(), 0
        while at < len(data):
            form, attribute, length = struct.unpack_from("<BBH", data, at)
            if attribute == KERNEL_PARAMETER:
                _, ordinal, offset, bits = struct.unpack_from("<IHHI", data, at + 4)
                found[ordinal] = offset, bits >> 18
            at += 4 + (length if form == WITH_PAYLOAD else 0)
    return [found[ordinal] for ordinal in sorted(found)]


def ptx_parameters(text: str) -> list[tuple[int, int]]:
    """(offset, size) in bytes of a PTX kernel's parameters, each aligned to its size."""
    header = text[text.index(".entry") :]
    return natural_layout(int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", header[: header.index(")")]))


def natural_layout(sizes: Iterator[int]) -> list[tuple[int, int]]:
    """(offset, size) of parameters of these sizes, each aligned to its own: what a launch packs."""
    layout, end = [], 0
    for size in sizes:
        offset = -(-end // size) * size
        layout.append((offset, size))
        end = offset + size
    return layout


def amd_kernel(image: bytes) -> dict[str, object]:
    """The metadata note of a code object's one kernel, as in LLVM's description of the AMDGPU back end."""
    import msgpack
    from elftools.elf.elffile import ELFFile

    for segment in ELFFile(io.BytesIO(image)).iter_segments("PT_NOTE"):
        for note in segment.iter_notes():
            raw = note["n_descdata"]
            data = msgpack.unpackb(raw if isinstance(raw, bytes) else raw.encode("latin-1"), strict_map_key=False)
            (kernel,) = data["amdhsa.kernels"]
            return dict(kernel)
    raise BuildError("the code object has no metadata note.")


def amd_parameters(image: bytes) -> list[tuple[int, int]]:
    """(offset, size) in bytes of a code object's explicit kernel arguments, in order."""
    arguments = amd_kernel(image)[".args"]
    return [(a[".offset"], a[".size"]) for a in arguments if not a[".value_kind"].startswith("hidden_")]


def instructions(text: str) -> dict[str, int]:
    """Counts of the instructions that tell how an image works: matrix products, tensor memory, loads from memory.

    Args:
        text: nvdisasm's output, or the AMD assembly that the object was made from.
    """
    names = (SASS_INSTRUCTION if "/*0000*/" in text else AMD_INSTRUCTION).findall(text)
    told = (MATRIX, TENSOR_MEMORY, GATHER)
    return dict(sorted(Counter(name for name in names if any(kind.fullmatch(name) for kind in told)).items()))


def instruction_problems(counts: Mapping[str, int], expected: str) -> Iterator[str]:
    """What is wrong with an image of these instructions, whose matrix products are to be `expected`, a prefix."""
    if not any(name.startswith(expected) for name in counts if MATRIX.fullmatch(name)):
        yield f"its matrix products were to be {expected}, but it has {counts}"
    # Tensor memory is code that no part at hand has run, and that 12.x parts lack.
    for name in counts:
        if TENSOR_MEMORY.fullmatch(name):
            yield f"it uses tensor memory ({name})"
        # A buffer's offset has 32 bits: a pool over 2 GiB or 4 GiB would be read at the wrong place.
        if name.startswith("buffer_"):
            yield f"it reaches memory through a buffer descriptor ({name}), whose offsets have 32 bits"


DEFINITION = re.compile(r"^\s*(%[\w#]+)(?::\d+)? = ([\w.]+) ?(.*)$")
OPERAND = re.compile(r"%[\w#]+")
FORWARDED = ("tt.splat", "tt.expand_dims", "tt.broadcast", "ttg.convert_layout", "tt.reshape")


def address_problems(ir: str) -> Iterator[str]:
    """Addresses of two-byte elements (q, the pools, out) in Triton's IR that are not computed in 64 bits.

    Every offset is a 64-bit value, or bounded by constants (a position inside a row); and no 64-bit offset is the
    extension of a 32-bit product, unless one factor is a constant (a head block times its size).
    """
    defined: dict[str, tuple[str, str]] = {}
    for line in ir.splitlines():
        if not (match := DEFINITION.match(line)):
            continue
        name, operation, rest = match.groups()
        rest = re.sub(r" loc\(.*$", "", rest)
        defined[name] = operation, rest
        if operation == "tt.addptr" and re.search(r": (?:tensor<[\dx]*)?!tt\.ptr<b?f16>", rest):
            offset = OPERAND.findall(rest)[1]
            wide = re.search(r"[x ]i64\b[^!]*$", rest) is not None
            if not wide and not _bounded(offset, defined):
                yield f"a 32-bit offset: {operation} {rest}"
            if wide and (product := _narrow_product(offset, defined, set())):
                yield f"a 64-bit offset made of a 32-bit product: {product}"


def _bounded(name: str, defined: Mapping[str, tuple[str, str]]) -> bool:
    """A value made of ranges and constants only."""
    operation, rest = defined.get(name, ("", ""))
    if operation in ("tt.make_range", "arith.constant"):
        return True
    if operation in (*FORWARDED, "arith.addi", "arith.muli"):
        return all(_bounded(operand, defined) for operand in OPERAND.findall(rest))
    return bool(re.fullmatch(r"%c\d+_i32(_\d+)?", name))


def _narrow_product(name: str, defined: Mapping[str, tuple[str, str]], seen: set[str]) -> str:
    """A 32-bit product of two run-time values that a value is made of, or ""."""
    operation, rest = defined.get(name, ("", ""))
    if name in seen or operation not in (*FORWARDED, "arith.addi", "arith.muli", "arith.extsi", "arith.select"):
        return ""
    seen.add(name)
    operands = OPERAND.findall(rest)
    narrow = operation == "arith.muli" and "i32" in rest.rpartition(" : ")[2]
    if narrow and not any(_bounded(operand, defined) for operand in operands):
        return f"{operation} {rest}"
    return next(filter(None, (_narrow_product(operand, defined, seen) for operand in operands)), "")
