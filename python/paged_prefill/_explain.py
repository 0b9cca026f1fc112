"""Every error of this package explained: the pages behind `paged-prefill explain` and docs/errors.md.

The texts themselves live in the extension's table; here is one entry for each, under the same name.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from . import _C


@dataclass(frozen=True)
class Entry:
    """One message: what it means, how it comes about, how to mend it, how to prevent it."""

    means: str
    cause: str
    mend: str
    prevent: str


HEADINGS = {
    "means": "What it means",
    "cause": "How it comes about",
    "mend": "How to mend it",
    "prevent": "How to prevent it",
}

_REINSTALL = "Install the wheel anew, from its file: `pip install --force-reinstall --no-deps paged_prefill-*.whl`."

ENTRIES: Mapping[str, Entry] = {
    "device": Entry(
        "q is not on a GPU. The operator has kernels for CUDA and HIP devices only.",
        "A tensor made without `device=`, a model that was not moved, a torch build without GPU support, or a test on "
        "a machine without a GPU.",
        "Move q and every other tensor of the call to one device, for example `q.to('cuda')`. On a CPU, "
        "`paged_prefill.reference` takes the same arguments and computes the same formula.",
        "Make the tensors on the device that the model is on: `torch.empty(..., device=q.device)`.",
    ),
    "q_dtype": Entry(
        "The queries are neither bf16 nor fp16, the dtypes that the kernels compute with.",
        "A model in fp32, an FP8 activation that was not dequantized, or a projection that runs outside autocast.",
        "Cast q to the dtype of the pools: `q.to(torch.bfloat16)`.",
        "Load the model in bf16 or fp16, and keep quantized activations on the other side of the projections.",
    ),
    "unified_kv_dtype": Entry(
        "The paged pool has another dtype than the queries; its rows are read as they are, so the two must agree. "
        "An FP8 cache is refused by this text.",
        "A server started with a quantized cache (`--kv-cache-dtype fp8_e4m3` and the like), or a cache in bf16 beside "
        "a model in fp16.",
        "Start the server with the cache in the model's dtype (`--kv-cache-dtype auto` or `bfloat16`). To keep the "
        "cache quantized, dequantize the pages of this batch into a bf16 pool before the call, with their indices "
        "renumbered.",
        "Derive the cache dtype from the model's dtype where the pool is allocated.",
    ),
    "kv_dtype": Entry(
        "This forward's own keys have another dtype than the queries.",
        "Keys that are quantized for the cache are passed on instead of the ones that were computed, or q alone was "
        "cast.",
        "Pass the keys before quantization, or cast them: `kv.to(q.dtype)`.",
        "Cast once, where q and kv leave the projection.",
    ),
    "head_dim": Entry(
        "The rows of the pool and of this forward's keys have different lengths. A row is key and value at once, so "
        "there is one head_dim.",
        "One of the two still carries extra columns (576 = 512 + 64 for separate rotary parts, scales packed behind a "
        "row), or a pool of another layer class was passed.",
        "Slice or view the wider one: `unified_kv[:, :512]` is taken as it is, without a copy.",
        "Allocate the pool from the same configuration value that shapes kv.",
    ),
    "rank": Entry(
        "An argument has another number of dimensions than the operator's signature says.",
        "A pool still shaped [pages, page_size, D] or [rows, 1, D], q flattened to [T, H * D], or index lists as a "
        "rectangle [T, K].",
        "View it in the shape that the message names: `unified_kv.view(-1, D)`, `q.view(T, H, D)`, "
        "`indices.flatten()` with an indptr that counts them.",
        "Build the arguments in the shapes of the docstring; views cost nothing.",
    ),
    "q_head_dim": Entry(
        "The queries' head_dim is not that of the pools.",
        "q still carries its rotary part as extra columns, or q was not projected into the latent space the pool "
        "holds.",
        "Slice or project q to the pool's head_dim; a slice such as `q[:, :, :512]` is taken without a copy.",
        "Shape q and both pools from the same configuration value.",
    ),
    "tensor_device": Entry(
        "An argument is on another device than q. Its address would mean nothing there.",
        "Index lists left on the CPU by the scheduler, or one device's pool passed to another device's rank.",
        "Move the argument: `x.to(q.device)`.",
        "Send index lists to the device with the batch, from pinned memory and without blocking.",
    ),
    "layout": Entry(
        "An argument is a sparse, quantized or otherwise wrapped tensor, whose memory is no plain array.",
        "`to_sparse_csr()` in place of the operator's own lists, or a quantized tensor class around the pool.",
        "Convert it with `to_dense()` or `dequantize()`, or pass the plain tensor inside it.",
        "Give the operator plain tensors; its lists are the sparse part.",
    ),
    "index_dtype": Entry(
        "An index list or an indptr holds something other than int32 or int64.",
        "A mask passed as a list, uint32 from a custom kernel, or int16 to save memory.",
        "Cast it: `indices.to(torch.int32)`.",
        "Produce int32 lists, which are passed on as they are; int64 ones are narrowed by one more small kernel.",
    ),
    "indptr_length": Entry(
        "An indptr does not have one entry more than q has tokens, so it describes another batch.",
        "q padded to a captured graph's size while the lists are for the real tokens, the last entry left out, or the "
        "indptr of another layer class or chunk.",
        "Pad the indptr by repeating its last entry (padded tokens then have empty lists and give zeros), or slice q "
        "to the tokens that the lists describe.",
        "Pad q and both indptr in one place.",
    ),
    "list_length": Entry(
        "An index list has more entries than the kernels count for one token, to which all of it may belong.",
        "A rectangle [T, K] with a large K for a very long batch, most of it padding.",
        "Cut the call into chunks of tokens: slices of q and indptr, the same pools. Results are the same bit for bit.",
        "Build ragged lists of the selected rows, without padding.",
    ),
    "table_rows": Entry(
        "A pool has more rows than an int32 index can name, so that its last rows could never be selected.",
        "One tensor over a very large memory region with a small head_dim, or an expanded view.",
        "Pass the slice of rows that the lists name, `unified_kv[first:last]`, with indices that count from its start.",
        "Keep one pool a layer: a pool of 2^31 rows of 512 elements takes 2 TB.",
    ),
    "sink_length": Entry(
        "attn_sink does not have one logit for each head of q.",
        "Under tensor parallelism, the sink of all ranks' heads is passed to one rank, or q was padded with heads and "
        "the sink was not.",
        "Pass this rank's slice: `attn_sink[rank * H : (rank + 1) * H]`.",
        "Shard the sink where the query projection is sharded.",
    ),
    "sink_dtype": Entry(
        "attn_sink is neither fp32, fp16 nor bf16.",
        "A parameter loaded in fp64 or in a quantized dtype.",
        "Cast it: `attn_sink.to(torch.float32)`.",
        "Keep the sink in fp32, which is used as it is; a 16-bit one is widened by one more small kernel.",
    ),
    "num_heads": Entry(
        "q has no head, or more than 32 bits count.",
        "More tensor-parallel ranks than heads, so that one rank's share is empty, or the dimensions of q exchanged.",
        "Give the rank at least one head, or do not call the operator on a rank without any.",
        "Check that the head count divides by the number of ranks when the model is set up.",
    ),
    "head_dim_limit": Entry(
        "head_dim is not a multiple of 8 from 8 to the limit. A row is read in pieces of 16 bytes and held whole.",
        "Rows of 576 columns with the rotary part inside, or an odd test size.",
        "Slice the columns that are not part of the dot product, or pad q, unified_kv and kv with zeros and slice the "
        "result.",
        "Use 512, 256, 128 or 64, which have kernels of their own; other multiples of 8 run a masked one.",
    ),
    "num_tiles": Entry(
        "The call has more tiles (tokens times groups of heads) than one launch counts.",
        "A batch of hundreds of millions of (token, head) pairs.",
        "Cut the call into chunks of tokens: slices of q and of both indptr, the same lists and pools.",
        "Bound the tokens of one prefill, as schedulers do anyway.",
    ),
    "last_stride": Entry(
        "The elements of a pool's row do not lie side by side.",
        "A transposed pool, or a slice with a step in the last dimension.",
        "Lay the pool out with head_dim innermost. It is never copied for you: it may fill the device.",
        "Allocate the pool as [rows, D] or as [rows, layers, D]; any stride between rows is fine.",
    ),
    "out_shape": Entry(
        "The given out or lse does not have this call's shape.",
        "A buffer kept from a larger batch, or lse as [H, T].",
        "Pass a slice of it (`out[:T]` is contiguous) or leave it out.",
        "Allocate the buffer for the largest batch and slice it for each call.",
    ),
    "out_dtype": Entry(
        "The given out is not of q's dtype, or lse is not fp32.",
        "An fp32 buffer for a bf16 result, or the reverse for lse.",
        "Allocate it with the dtype that the message names.",
        "`torch.empty_like(q)` for out, `torch.empty(T, H, dtype=torch.float32)` for lse.",
    ),
    "out_contiguous": Entry(
        "The given out or lse has gaps or another order of dimensions; the kernels write it whole.",
        "A slice of heads or columns of a larger tensor, or a transpose.",
        "Pass a contiguous tensor and copy it to its place afterwards.",
        "Let the operator allocate, and write the copy into the next operation's input.",
    ),
    "out_overlap": Entry(
        "The given out or lse shares memory with another tensor of the call, which is still read while it is written.",
        "An arena or a memory pool of one's own that hands out the same memory twice, or out as a part of q.",
        "Pass memory of its own, or exactly q: q itself, whole and contiguous, is allowed.",
        "Reuse q's memory only as `out=q`.",
    ),
    "requires_grad": Entry(
        "An input requires grad while grad mode is on. There is no backward, and a result without history would be "
        "wrong in silence.",
        "Inference outside `torch.no_grad()`, with a parameter (the sink, often) among the inputs.",
        "Call it under `torch.inference_mode()` or `torch.no_grad()`, or pass `x.detach()`.",
        "Put inference_mode around the server's forward, once.",
    ),
    "index_value": Entry(
        "Validation found an index that is neither a row of its table nor -1. Without validation it is a hole.",
        "Page numbers taken for row numbers, a block table of another layer or rank, rows of a pool that was resized, "
        "or a sentinel other than -1.",
        "Look at the token and entry that the message names where the list is built; write holes as -1.",
        "Run a server's tests with `PAGED_PREFILL_VALIDATE=1`, which checks every call, and its service without.",
    ),
    "indptr_value": Entry(
        "Validation found an indptr that decreases, is negative, or goes beyond its list. Without validation the bound "
        "is clamped, and such a token's list is cut or empty.",
        "An indptr made for a longer list, one that was not summed up (lengths in place of offsets), or a buffer "
        "that a later batch has overwritten.",
        "Build it as `torch.cat((zero, lengths.cumsum(0)))`, from the same lengths as the list.",
        "Run a server's tests with `PAGED_PREFILL_VALIDATE=1`, which checks every call, and its service without.",
    ),
    "validate_capture": Entry(
        "Validation has to wait for the device, which a stream capture forbids.",
        "`PAGED_PREFILL_VALIDATE=1` in a process that captures CUDA graphs, or `paged_prefill.validate` inside a "
        "capture.",
        "Validate before the capture, and capture with the variable unset.",
        "Set the variable for tests that run without graphs.",
    ),
    "no_kernel": Entry(
        "The tensors are of a kind that no kernel of this package knows, for example another back end's.",
        "A tensor subclass or a device whose dispatcher key is neither CUDA's nor HIP's.",
        "Pass plain dense tensors on one CUDA or HIP device.",
        "Unwrap subclasses before the call.",
    ),
    "no_image": Entry(
        "The wheel has no kernel image that this device can run. The second line gives the reason for each set of "
        "images.",
        "A part older than compute capability 8.0, an AMD part without images, a wheel built for a subset of the "
        "targets, or a driver too old for every image that would fit.",
        "Update the driver if a reason says so; otherwise install a wheel that lists the architecture, or build one: "
        "`PAGED_PREFILL_TARGETS=<target> pip wheel .`. `paged-prefill info --all` shows what this wheel has.",
        "Run `paged-prefill info` when a machine is set up: it needs no call and tells the same.",
    ),
    "no_variant": Entry(
        "The device has images, but none of them takes this dtype, head count, head_dim and alignment.",
        "A wheel built from a smaller grid of specs.",
        "Install the full wheel. The message lists the images that were considered.",
        "Do not cut the masked, unaligned image (`dany`) from a grid of your own: it takes every call.",
    ),
    "bad_manifest": Entry(
        "The list of images in the installed package cannot be read, or is of another version.",
        "An installation that was interrupted, copied in part, or mixed from two versions.",
        _REINSTALL,
        "Install wheels whole; do not copy single files over an installed package.",
    ),
    "bad_image": Entry(
        "An image in the installed package is missing, cut short, or not what was built. It was not loaded.",
        "A full disk during installation, a tool that rewrites or strips binaries, or a damaged file system.",
        _REINSTALL,
        "Exclude `paged_prefill/images` from strip and similar steps of an image build.",
    ),
    "bad_argument": Entry(
        "An image asks for a kernel argument that the extension does not have: the two are of different versions.",
        "Files of two versions mixed in one installation.",
        _REINSTALL,
        "Upgrade by installing a wheel, never by copying images.",
    ),
    "forked": Entry(
        "This process is the fork of one that had already used the GPU; a driver does not survive a fork.",
        "A data loader or worker pool with the 'fork' method, started after the first call.",
        "Start workers with the 'spawn' or 'forkserver' method, or fork before the first call.",
        "`torch.multiprocessing.set_start_method('spawn')` at the top of the program.",
    ),
    "no_driver": Entry(
        "The driver's library cannot be opened, or lacks a function that every supported version has.",
        "A container started without access to the GPU, a machine without a driver, or one that is far too old.",
        "Start the container with the GPU (`--gpus all`; for AMD `--device /dev/kfd --device /dev/dri`), or install "
        "the driver.",
        "Check `paged-prefill info` inside the container before the server starts.",
    ),
    "no_stream": Entry(
        "torch's current stream cannot be asked for, so the kernel cannot be put in order with torch's own.",
        "A torch built without the vendor of this GPU, or an unusual build that hides its GPU library.",
        "Install the torch wheel for this GPU's vendor (CUDA or ROCm).",
        "Install torch before paged-prefill, from the index of the wanted CUDA or ROCm version.",
    ),
    "no_loader": Entry(
        "The extension was loaded without the Python package around it, which tells it of the images.",
        "`import paged_prefill._C`, or `torch.ops.load_library` of the extension's file.",
        "`import paged_prefill`, which also registers `torch.ops.paged_prefill`.",
        "Import the package, never the extension.",
    ),
    "driver_call": Entry(
        "A call of the driver failed. Errors are reported late: an earlier kernel of this process may be its cause.",
        "An illegal access by an earlier kernel, a device that ran out of memory or fell off the bus, or a device in "
        "exclusive use.",
        "Run again with `CUDA_LAUNCH_BLOCKING=1` (AMD: `AMD_SERIALIZE_KERNEL=3`) to see which kernel fails; "
        "`compute-sanitizer` names the access. A process after such an error has to be restarted.",
        "No index or indptr content makes this operator access anything outside its tensors; look at its neighbours "
        "first.",
    ),
    "driver_image": Entry(
        "The driver does not take this kernel image.",
        "A driver older than the image's format, or one that cannot compile the PTX that stands in for missing images; "
        "its own words follow.",
        "Update the driver. `paged-prefill info` shows the oldest version that each set of images needs.",
        "Choose the driver by the support table before a fleet is set up.",
    ),
    "driver_lost": Entry(
        "The device's context, and with it the loaded kernel image, was destroyed after the image had been loaded.",
        "A device reset within the process: `cudaDeviceReset`, or a library that makes one.",
        "Call again: the image is loaded anew. torch's own memory on that device is gone too, so restarting the "
        "process is the safe way.",
        "Do not reset a device that other libraries of the process use.",
    ),
    "driver_capture": Entry(
        "An image had to be loaded during a stream capture, which the driver did not allow.",
        "The first call with this dtype, head count or head_dim happens inside `torch.cuda.graph`.",
        "Call `paged_prefill.preload()` before the capture, on each device that captures.",
        "Call `paged_prefill.preload()` at start-up: it loads every image of the device, in milliseconds.",
    ),
}

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def find(query: str) -> list[str]:
    """Names of the messages that a text is, contains, or is a piece of; the best ones, several if they tie."""
    texts, words = _C.guard_texts(), " ".join(query.split())
    if words in texts:
        return [words]
    whole = {}
    for name, parts in texts.items():
        whole[name] = sum(_literal_length(part) for part in parts if _pattern(part).search(query))
    if max(whole.values()):
        return _best(whole)
    if len(words) >= 8 and (piece := [n for n, parts in texts.items() if words.lower() in " ".join(parts).lower()]):
        return piece
    return _by_words(words)


def _by_words(query: str) -> list[str]:
    """A few words of a message or of its page: the entries that have most of them, rare words weighing more."""
    titles, pages = {}, {}
    for name, parts in _C.guard_texts().items():
        titles[name] = _words(_PLACEHOLDER.sub(" ", " ".join((*parts, name, name.replace("_", " ")))))
        pages[name] = titles[name] | _words(" ".join(asdict(ENTRIES[name]).values()))
    counts = {word: sum(word in words for words in pages.values()) for word in _words(query)}
    weights = {word: math.log(len(pages) / count) for word, count in counts.items() if count}

    def share(words: set[str]) -> float:
        return sum(weight for word, weight in weights.items() if word in words) / max(sum(weights.values()), 1.0)

    found = _best({name: share(pages[name]) + share(titles[name]) for name in pages})
    named = len(weights) == 1 or share(titles[found[0]]) >= 0.5
    return found if named and len(found) <= 4 and share(pages[found[0]]) >= 0.6 else []


def _best(scores: Mapping[str, float]) -> list[str]:
    top = max(scores.values())
    return [name for name, score in scores.items() if score > top - 1e-9]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w{2,}", text.lower()))


def _literal_length(template: str) -> int:
    return len(_PLACEHOLDER.sub("", template))


def _pattern(template: str) -> re.Pattern[str]:
    """Matches a template with any values in its {placeholders}; a value that occurs twice is the same twice."""
    pieces = _PLACEHOLDER.split(template)
    pattern, seen = r"(?<!\w)", set[str]()
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            pattern += r"\s+".join(map(re.escape, piece.split(" ")))
            continue
        # Nothing bounds a value at either end of a text: there it is one word, or what is left of the line.
        at_start, at_end = i == 1 and not pieces[0], i == len(pieces) - 2 and not pieces[-1]
        value = r"[^\n]*" if at_end else r"\S+?" if at_start else ".+?"
        pattern += f"(?P={piece})" if piece in seen else f"(?P<{piece}>{value})"
        seen.add(piece)
    return re.compile(pattern + (r"(?!\w)" if template[-1].isalnum() else ""))


def values(name: str, query: str) -> dict[str, str]:
    """What stands for the placeholders of a message's text in `query`, if the whole text is there."""
    found = _pattern(_C.guard_texts()[name][0]).search(query)
    return {key: value.strip("'\") ") for key, value in found.groupdict().items()} if found else {}


def explain(options: argparse.Namespace) -> int:
    """Prints the pages that a text leads to; without a text, a list of all texts. Status 1 if nothing fits."""
    if options.all:
        print(page(), end="")
        return 0
    query = " ".join(options.text)
    if query == "-":
        query = sys.stdin.read()
    names = find(query) if query.strip() else list(_C.guard_texts())
    if options.json:
        entries = [{**_document(name), "values": values(name, query)} for name in names]
        print(json.dumps({"query": query, "entries": entries}, indent=1))
        return 0 if names else 1
    if not query.strip():
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {_C.guard_texts()[name][0]}")
        print("\n`paged-prefill explain` with one of these, whole or in part, or by its name, prints its page.")
        return 0
    if not names:
        print("error: no message of this package has these words; `paged-prefill explain` lists all", file=sys.stderr)
        return 1
    for name in names:
        _print(name, query)
    return 0


def _document(name: str) -> dict[str, str]:
    text, hint = _C.guard_texts()[name]
    return {"name": name, "text": text, "hint": hint, **asdict(ENTRIES[name])}


def _print(name: str, query: str) -> None:
    text, hint = _C.guard_texts()[name]
    print(f"\n{name}\n\n  {text}\n{textwrap.indent(textwrap.fill(hint, 96), '  ')}")
    if found := values(name, query):
        print("\n  here: " + ", ".join(f"{key} = {value}" for key, value in found.items()))
    for field, heading in HEADINGS.items():
        words = getattr(ENTRIES[name], field).replace("`", "")
        print(f"\n{heading}\n{textwrap.indent(textwrap.fill(words, 96), '  ')}")


def page() -> str:
    """docs/errors.md: every entry, in the order of the guards."""
    lines = [
        "# Errors",
        "",
        "Written by `paged-prefill explain --all > docs/errors.md`; a test fails when it is stale.",
        "",
        "Every error is a `RuntimeError` whose first line is one of these texts, with values in the place of the",
        "`{names}`; the second line says what to do. Nothing has been launched when an argument is refused. The first",
        "five texts are those of the public Triton version, word for word, so that code which matches on them goes on",
        "working. On the command line, `paged-prefill explain TEXT` finds the entry of a text, whole or in part.",
    ]
    for name, (text, hint) in _C.guard_texts().items():
        lines += ["", f"## {name}", "", "```text", text, hint, "```", ""]
        for field, heading in HEADINGS.items():
            lines += [textwrap.fill(f"**{heading}.** {getattr(ENTRIES[name], field)}", 110), ""]
        lines.pop()
    return "\n".join(lines) + "\n"
