"""The text that the CPU's compiler gets: a kernels file's device text, with what CUDA's words need.

Shared variables become thread-local ones (a block's threads are fibers of one OS thread), kernels
get a hidden argument with their built-in variables, and a table of kernels follows. Lines stay the
user's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kernels.declarations import survey
from kernels.errors import KernelsError
from kernels.lift import KernelsFile
from kernels.tokens import Token, matching, read, split_commas

_SYNCHRONISES = (
    "__syncthreads",
    "__syncwarp",
    "__shfl",
    "__ballot_sync",
    "__any_sync",
    "__all_sync",
)


def synchronising(file: KernelsFile) -> tuple[frozenset[str], frozenset[str]]:
    """Kernels that meet a barrier or shuffle, and those that use atomics, through all they call."""
    found = survey(read(str(file.path), file.device_text))
    direct: dict[str, set[str]] = {}
    for item in found.items:
        words = {t.text for t in item.tokens if t.kind == "name"}
        for name in item.names:
            direct.setdefault(name, set()).update(words)
    for macro in found.source.macros.values():
        direct.setdefault(macro.name, set()).update(t.text for t in macro.body)
    cooperative, atomic = set(), set()
    for kernel in file.kernels:
        seen: set[str] = set()
        todo = [kernel]
        while todo:
            word = todo.pop()
            if word not in seen:
                seen.add(word)
                todo += direct.get(word, ())
        if any(w.startswith((*_SYNCHRONISES, "__reduce_")) for w in seen):
            cooperative.add(kernel)
        if any(w.startswith("atomic") for w in seen):
            atomic.add(kernel)
    return frozenset(cooperative), frozenset(atomic)


def host_text(file: KernelsFile, cooperative: frozenset[str]) -> str:
    """`file.device_text` for the CPU: shared variables made thread-local, kernels made callable.

    Kernels that are not `cooperative` (no barrier or shuffle, and not watched for races) become the
    body of a loop over the block's threads.
    """
    text = file.device_text
    tokens = read(str(file.path), text).tokens
    out: list[str] = []
    done = 0
    depth = 0
    for i, token in enumerate(tokens):
        depth += {"{": 1, "}": -1}.get(token.text if token.kind == "punct" else "", 0)
        if token.text == "__global__":
            opening = _kernel_at(tokens, i, file)
            if tokens[opening - 1].text not in cooperative:
                out += [text[done : token.start], "SIMT_INLINE "]
                done = token.start
            closing = matching(tokens, opening, str(file.path))
            words = [t.text for t in tokens[opening + 1 : closing]]
            comma = "" if words in ([], ["void"]) else ", "
            out += [text[done : tokens[opening].end], f"SIMT_PARAMETER{comma}"]
            done = tokens[opening].end
            if words == ["void"]:
                out.append(text[done : tokens[opening + 1].start])
                done = tokens[opening + 1].end
            if tokens[closing + 1].text == "{":
                out += [text[done : tokens[closing + 1].end], " SIMT_HERE"]
                done = tokens[closing + 1].end
        if token.text != "__shared__":
            continue
        first = i
        while tokens[first - 1].text not in (";", "{", "}", ")"):
            first -= 1
        last = i
        while tokens[last].text != ";":
            if tokens[last].text in ("(", "["):
                last = matching(tokens, last, str(file.path))
            last += 1
        start, end = tokens[first].start, tokens[last].end
        line = file.device_text.count("\n", file.device_text.index("#line 1 "), start)
        if depth == 0:
            raise KernelsError(
                f"{file.path}:{line}: a __shared__ variable outside a function; "
                "declare it inside the kernel"
            )
        made = _shared_variable(tokens[first : last + 1], f"{file.path}:{line}")
        out += [text[done:start], made, "\n" * text.count("\n", start, end)]
        done = end
    out.append(text[done:])
    glue = "".join(
        f"SIMT_KERNEL({name}, simt::thread<{name}>, nullptr)\n"
        if name in cooperative
        else f"SIMT_KERNEL({name}, nullptr, simt::block<{name}>)\n"
        for name in file.kernels
    )
    return "".join(out) + '\n#line 1 "kernel table"\n' + glue


def _kernel_at(tokens: Sequence[Token], at: int, file: KernelsFile) -> int:
    """Index of the parenthesis behind the kernel's name, for the `__global__` at index `at`."""
    for i, (word, following) in enumerate(itertools.pairwise(tokens[at:]), at):
        if following.text == "(" and word.text in file.kernels:
            return i + 1
    raise KernelsError(f"{file.path}: a __global__ without a function")


def _shared_variable(words: Sequence[Token], where: str) -> str:
    """`__shared__ float m[4];` as a thread-local array and its poison; extern ones as a pointer."""
    extern = any(w.text == "extern" for w in words)
    kept = [w for w in words[:-1] if w.text not in ("__shared__", "static", "extern")]
    parts = split_commas(kept)
    names = []
    renamed: set[int] = set()
    for part in parts:
        stop = next((i for i, w in enumerate(part) if w.text == "[" and i > 0), len(part))
        named = [w for w in part[:stop] if w.kind == "name"]
        if not named or any(w.text == "=" for w in part):
            raise KernelsError(f"{where}: this __shared__ declaration is not understood")
        names.append(named[-1].text)
        renamed.add(named[-1].start)
    if extern:
        if len(parts) != 1 or [w.text for w in parts[0][-2:]] != ["[", "]"]:
            raise KernelsError(f"{where}: extern __shared__ must declare one array, `T name[];`")
        base: list[str] = []
        at = 0
        head = parts[0][:-3]
        while at < len(head):
            if head[at].text in ("__align__", "alignas", "__attribute__"):
                at = matching(head, at + 1, where) + 1
                continue
            base.append(head[at].text)
            at += 1
        kind = " ".join(base)
        return f"SIMT_DYNAMIC({names[0]}, {kind})"
    # an alignas in the middle of a declaration is nvcc's own liberty
    plain = ("__align__" if w.text == "alignas" else w.text for w in kept)
    plain = (
        f"simt_shared_{word}" if w.start in renamed else word
        for w, word in zip(kept, plain, strict=True)
    )
    spelled = "".join(w + " " if w.isidentifier() else w for w in plain)
    return f"static __thread {spelled};" + "".join(f" SIMT_SHARED({name})" for name in names)
