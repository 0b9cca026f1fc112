"""AMD code objects (hsaco) in host memory: their metadata, their arguments, and one launch on the emulator.

What a launch needs is read from the object itself (entry, argument offsets and sizes, register set-up) and from the
manifest's record of the variant (argument names and types in order, threads, LDS bytes), never assumed.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import struct
from collections.abc import Mapping

import corrections
import msgpack
import torch
from elftools.elf.elffile import ELFFile

METADATA_NOTE = 32  # NT_AMDGPU_METADATA: a msgpack map
SCRATCH_POINTERS = 2  # Triton appends two pointers to a kernel's own arguments; null when their sizes are 0
SIZES = {"ptr": 8, "i64": 8, "i32": 4, "fp32": 4}
# Target -> the emulator's name of its instruction set; what is not here is not emulated.
ISA = {
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), "cdna"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1151"), "rdna3"),
    **dict.fromkeys(("gfx1200", "gfx1201"), "rdna4"),
}
USER_REGISTERS = (4, 2, 2, 2, 2, 2, 1)  # SGPRs that each enable bit of the descriptor's code properties asks for
KERNARG_POINTER, DISPATCH_ID, PRIVATE_SIZE = 3, 4, 6  # positions in it
LDS_SIZE = 0x1FF << 15  # field of compute_pgm_rsrc2, in units of 512 bytes

# The emulator remembers decoded instructions by address, so a mapped object stays mapped until the process ends.
_mapped: list[mmap.mmap] = []


class CodeObject:
    """One hsaco, mapped as a loader maps it.

    Attributes: target (the processor's name, "gfx942"), metadata (the kernel's map, with ".args"), entry and size
    (address and bytes of the code), private_size (scratch bytes a lane), rsrc2 and properties (of the descriptor).
    """

    def __init__(self, image: bytes) -> None:
        elf = ELFFile(io.BytesIO(image))
        notes = {kind: content for name, kind, content in _notes(elf) if name == b"AMDGPU"}
        metadata = msgpack.unpackb(notes[METADATA_NOTE], strict_map_key=False)
        (self.metadata,) = metadata["amdhsa.kernels"]
        self.target = metadata["amdhsa.target"].partition(":")[0].rpartition("-")[2]

        loads = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"]
        span = max(segment["p_vaddr"] + segment["p_memsz"] for segment in loads)
        memory = mmap.mmap(-1, span + mmap.PAGESIZE)  # decoding reads a few bytes beyond the last instruction
        _mapped.append(memory)
        for segment in loads:
            memory[segment["p_vaddr"] : segment["p_vaddr"] + segment["p_filesz"]] = segment.data()
        symbols = {symbol.name: symbol for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}
        code = symbols[self.metadata[".name"]]
        descriptor = symbols[self.metadata[".symbol"]]["st_value"]
        (self.private_size,) = struct.unpack_from("<I", memory, descriptor + 4)
        (entry,) = struct.unpack_from("<q", memory, descriptor + 16)
        self.rsrc2, self.properties = struct.unpack_from("<IH", memory, descriptor + 52)
        entry += descriptor
        if entry != code["st_value"]:
            raise ValueError(f"the descriptor's entry {entry:#x} is not the kernel symbol's {code['st_value']:#x}")
        self.entry = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + entry
        self.size = code["st_size"]
        if self.target == "gfx90a":
            corrections.renumber_gfx90a(self.entry, self.size)

    def pack(self, arguments: list[list[str]], values: Mapping[str, int | float | torch.Tensor | None]) -> bytes:
        """The kernel argument segment: `arguments` is the manifest's [name, type] list, None a null pointer."""
        described = self.metadata[".args"]
        explicit = [d for d in described if not d[".value_kind"].startswith("hidden_")]
        if len(explicit) != len(arguments) + SCRATCH_POINTERS:
            raise ValueError(
                f"the object takes {len(explicit)} arguments; the manifest names {len(arguments)}, "
                f"to which come {SCRATCH_POINTERS} scratch pointers"
            )
        segment = bytearray(self.metadata[".kernarg_segment_size"])
        for (name, kind), d in zip(arguments, explicit, strict=False):
            if d[".size"] != SIZES[kind] or (d[".value_kind"] == "global_buffer") != (kind == "ptr"):
                found = f"{d['.value_kind']} of {d['.size']} bytes"
                raise ValueError(f"{name} is {kind} in the manifest, {found} in the object")
            value = values[name]
            if kind == "ptr":
                packed = struct.pack("<Q", 0 if value is None else value.data_ptr())
            else:
                packed = struct.pack({"i64": "<q", "i32": "<i", "fp32": "<f"}[kind], value)
            segment[d[".offset"] : d[".offset"] + d[".size"]] = packed
        return bytes(segment)

    def launch(self, grid: int, threads: int, shared: int, segment: bytes) -> None:
        """Run `grid` workgroups of `threads` work items with `shared` bytes of LDS."""
        room = ctypes.create_string_buffer(len(segment) + 64)
        kernarg = ctypes.addressof(room) + 63 & ~63
        ctypes.memmove(kernarg, segment, len(segment))
        registers: list[int] = []
        for bit, count in enumerate(USER_REGISTERS):
            if self.properties >> bit & 1:
                content = {KERNARG_POINTER: [kernarg & 0xFFFFFFFF, kernarg >> 32], PRIVATE_SIZE: [self.private_size]}
                registers += content.get(bit, [0] * count)
        # Triton's objects use dynamic LDS only: the descriptor says 0 and the launch says how much.
        rsrc2 = self.rsrc2 & ~LDS_SIZE | (shared + 511) // 512 << 15
        isa = ISA[self.target]
        corrections.run(self.entry, self.size, grid, threads, kernarg, rsrc2, self.private_size, isa, registers)


def _notes(elf: ELFFile):
    """(name, type, content) of each note; read by hand, since pyelftools does not know AMD's types."""
    for segment in elf.iter_segments():
        if segment["p_type"] != "PT_NOTE":
            continue
        data, at = segment.data(), 0
        while at < len(data):
            name_size, size, kind = struct.unpack_from("<III", data, at)
            name_at = at + 12
            content_at = name_at + (name_size + 3 & ~3)
            yield data[name_at : name_at + name_size].rstrip(b"\0"), kind, data[content_at : content_at + size]
            at = content_at + (size + 3 & ~3)
