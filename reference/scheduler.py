"""What the engine's control flow must do: slots, positions, pages and prints, without activations.

Written from the engine's description (main.cpp:574-605, 695-1039), not from the port, which is
compared with it. `Scheduler.run` yields one frozen event for each prefill and each decode step, in
order: its fields are what happened, its tables what lies on the host and the device afterwards.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

BLOCK_SIZE = 16  # tokens a page
NUM_BLOCKS = 65536
N_LAYERS = 16  # stride of the table; a checkpoint with fewer layers uses the first of them
END_TOKENS = (128001, 128009)  # end of text, end of turn


@dataclass(frozen=True)
class Emitted:
    """A token chosen for a slot, and its logit if the source of tokens knows one."""

    slot: int
    token: int
    logit: float | None = None

    @property
    def line(self) -> str | None:
        """The line that the engine prints (main.cpp:533-543, 998-1014); None without a logit."""
        if self.logit is None:
            return None
        return f"Output token: {self.logit:g}, token index: {self.token}"  # as C++'s default


@dataclass(frozen=True)
class Page:
    """A block taken from the free list, or given back to it, and where the table has it."""

    slot: int
    layer: int
    logical: int
    block: int


@dataclass(frozen=True, eq=False)
class Event:
    """What one prefill or one decode step did, and what it left behind."""

    emitted: tuple[Emitted, ...]  # in the order printed
    popped: tuple[Page, ...]
    freed: tuple[int, ...]  # slots that ended
    pushed: tuple[Page, ...]  # in the order given back; the last is the next to be taken
    host_table: np.ndarray  # int32 (slots, 16, max_seq_len / 16), -1 where no block is
    device_table: np.ndarray
    lengths: tuple[int, ...]  # current_prompt_len of every slot, stale where the slot is free
    free: tuple[bool, ...]  # is_slot_free


@dataclass(frozen=True, eq=False)
class Prefill(Event):
    """One prompt went into one slot."""

    slot: int
    prompt_index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Refill(Prefill):
    """A prefill inside the decode loop, into a slot that had ended (main.cpp:722-737)."""


@dataclass(frozen=True, eq=False)
class Step(Event):
    """One turn of the decode loop; row r of every field is the r-th active slot."""

    index: int  # 0 for the first step of the run
    active_slots: tuple[int, ...]
    positions: tuple[int, ...]  # where the fed tokens' keys and values go
    seq_lens: tuple[int, ...]  # positions + 1: what attention sees
    tokens_fed: tuple[int, ...]


class Tokens(Protocol):
    """Where tokens come from: forced ids, or a model's argmax."""

    def prefill(self, slot: int, prompt_index: int, tokens: tuple[int, ...], step: int) -> Emitted:
        """The token after a prompt; it is fed in decode step `step` (counted over the run)."""
        ...

    def step(
        self, slots: tuple[int, ...], positions: tuple[int, ...], fed: tuple[int, ...], step: int
    ) -> Sequence[Emitted]:
        """The tokens after decode step `step`, one an active slot, in slot order."""
        ...


class ForcedTokens:
    """Fixed ids that stand for every argmax: slot s's k-th chosen token is ids[s][k], wrapping.

    So decode step k feeds slot s the id ids[s][k], as long as no other prompt takes the slot over.
    """

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self.ids = ids
        self._taken = [0] * len(ids)

    def _next(self, slot: int) -> Emitted:
        own = self.ids[slot]
        token = own[self._taken[slot] % len(own)]
        self._taken[slot] += 1
        return Emitted(slot, token)

    def prefill(self, slot: int, prompt_index: int, tokens: tuple[int, ...], step: int) -> Emitted:
        """The slot's next id."""
        return self._next(slot)

    def step(
        self, slots: tuple[int, ...], positions: tuple[int, ...], fed: tuple[int, ...], step: int
    ) -> list[Emitted]:
        """Each slot's next id."""
        return [self._next(slot) for slot in slots]


class Scheduler:
    """The engine's slots, queue, free list and block tables, for prompts given as lists of ids.

    `eos_after_prefill`: whether an end token that prefill emits ends the slot at once, as it must;
    the engine goes on from it instead (repair prefill-eos). A slot so ended is refilled, if prompts
    are left, at the next turn of the loop, as one that ended in decode is.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Tokens,
        *,
        layers: int = N_LAYERS,
        slots: int = 2,
        max_seq_len: int = 2048,
        eos_after_prefill: bool = True,
    ) -> None:
        if not 1 <= layers <= N_LAYERS:
            raise ValueError(f"layers must be 1 to {N_LAYERS} (got {layers})")
        if max_seq_len < BLOCK_SIZE or max_seq_len % BLOCK_SIZE:
            raise ValueError(f"max_seq_len must be a multiple of {BLOCK_SIZE} (got {max_seq_len})")
        for prompt in prompts:
            if not 0 < len(prompt) < max_seq_len:
                raise ValueError(
                    f"prompts must have 1 to {max_seq_len - 1} ids (got {len(prompt)})"
                )
        self.tokens = tokens
        self.layers = layers
        self.max_seq_len = max_seq_len
        self.eos_after_prefill = eos_after_prefill
        self.queue = deque(enumerate(tuple(prompt) for prompt in prompts))
        self.free_blocks = list(range(NUM_BLOCKS))  # a stack: blocks are taken from its end
        shape = (slots, N_LAYERS, max_seq_len // BLOCK_SIZE)
        self.host_table = np.full(shape, -1, dtype=np.int32)
        self.device_table: np.ndarray | None = None  # nothing is uploaded before the first prefill
        self.free = [True] * slots
        self.generated: list[list[int]] = [[] for _ in range(slots)]
        self.last_token = [-1] * slots
        self.length = [0] * slots  # current_prompt_len
        self.steps = 0

    def run(self, max_steps: int | None = None) -> Iterator[Event]:
        """Yield the events of the whole program, or up to and with decode step `max_steps`."""
        for slot, free in enumerate(self.free):
            if free and self.queue:
                yield self._prefill(slot, Prefill)
        while max_steps is None or self.steps < max_steps:
            active = []
            for slot in range(len(self.free)):
                if self.free[slot] and self.queue:
                    yield self._prefill(slot, Refill)
                if not self.free[slot]:
                    active.append(slot)
            if active:
                yield self._step(tuple(active))
            elif not self.queue:
                return

    def _prefill(self, slot: int, kind: type[Prefill]) -> Prefill:
        prompt_index, tokens = self.queue.popleft()
        self.generated[slot] = []
        self.free[slot] = False
        pages = -(-len(tokens) // BLOCK_SIZE)
        popped = [
            self._pop(slot, layer, logical)
            for layer in range(self.layers)
            for logical in range(pages)
        ]
        emitted = self.tokens.prefill(slot, prompt_index, tokens, self.steps)
        self.length[slot] = len(tokens)
        self._upload()
        freed: list[int] = []
        pushed: list[Page] = []
        if self.eos_after_prefill and emitted.token in END_TOKENS:
            freed.append(slot)
            pushed = self._end(slot)
        else:
            self._accept(emitted)
        return kind(
            **self._outcome([emitted], popped, freed, pushed),
            slot=slot,
            prompt_index=prompt_index,
            tokens=tokens,
        )

    def _step(self, active: tuple[int, ...]) -> Step:
        positions = tuple(self.length[slot] for slot in active)
        fed = tuple(self.last_token[slot] for slot in active)
        popped = [
            self._pop(slot, layer, position // BLOCK_SIZE)
            for layer in range(self.layers)
            for slot, position in zip(active, positions, strict=True)
            if position % BLOCK_SIZE == 0
        ]
        self._upload()  # the engine does so in every layer
        emitted = list(self.tokens.step(active, positions, fed, self.steps))
        freed: list[int] = []
        pushed: list[Page] = []
        for slot, position, one in zip(active, positions, emitted, strict=True):
            if one.token in END_TOKENS or position == self.max_seq_len - 1:
                freed.append(slot)
                pushed += self._end(slot)
            else:
                self._accept(one)
                self.length[slot] += 1
        self.steps += 1
        return Step(
            **self._outcome(emitted, popped, freed, pushed),
            index=self.steps - 1,
            active_slots=active,
            positions=positions,
            seq_lens=tuple(position + 1 for position in positions),
            tokens_fed=fed,
        )

    def _outcome(
        self,
        emitted: Sequence[Emitted],
        popped: Sequence[Page],
        freed: Sequence[int],
        pushed: Sequence[Page],
    ) -> dict[str, Any]:
        """The fields of Event."""
        return {
            "emitted": tuple(emitted),
            "popped": tuple(popped),
            "freed": tuple(freed),
            "pushed": tuple(pushed),
            "host_table": self.host_table.copy(),
            "device_table": self.device_table,
            "lengths": tuple(self.length),
            "free": tuple(self.free),
        }

    def _pop(self, slot: int, layer: int, logical: int) -> Page:
        block = self.free_blocks.pop()
        self.host_table[slot, layer, logical] = block
        return Page(slot, layer, logical, block)

    def _end(self, slot: int) -> list[Page]:
        """Free a slot: its blocks go back layer by layer, page by page (main.cpp:1015-1031)."""
        self.free[slot] = True
        pushed = [
            Page(slot, int(layer), int(logical), int(self.host_table[slot, layer, logical]))
            for layer, logical in np.argwhere(self.host_table[slot] != -1)  # row-major order
        ]
        self.free_blocks += [page.block for page in pushed]
        self.host_table[slot] = -1
        self._upload()
        return pushed

    def _accept(self, emitted: Emitted) -> None:
        self.generated[emitted.slot].append(emitted.token)
        self.last_token[emitted.slot] = emitted.token

    def _upload(self) -> None:
        self.device_table = self.host_table.copy()
