"""The judges' walk: ideal and exact over one schedule, and the cases that it gives at each tap.

All prefills and all teacher-forced decode steps go through one layer before the next (reference/
model.py says why), so a comparison of layer N takes the cases of layer N and drops them before the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from harness.probe import Case, Event
from harness.result import MODEL_INPUT
from harness.taps import DECODE, PREFILL, TAPS
from reference.checkpoint import Checkpoint
from reference.model import Cache, Llama, Record, ideal_and_exact
from reference.scheduler import Emitted


class Walk:
    """Carries the hidden states of all events from layer to layer.

    events: in execution order. Each method returns the cases of its taps, in execution order.
    """

    def __init__(self, checkpoint: Checkpoint, events: Sequence[Event]) -> None:
        self._models = ideal_and_exact(checkpoint)
        self._events = events
        self._hidden: list[list[Tensor]] = []  # [event][ideal, exact]: (rows, 2048)

    @property
    def ideal(self) -> Llama:
        return self._models[0]

    def embed(self) -> list[Case]:
        cases = []
        for event in self._events:
            taken = _Recorder(event, None)
            self._hidden.append(
                [model.embed(event.tokens, taken.of(which)) for which, model in self._both()]
            )
            cases += taken.cases()
        return cases

    def layer(self, layer: int, wanted: bool = True) -> list[Case]:
        """Walk one layer; its cases if they are wanted."""
        caches: list[dict[int, Cache]] = [{}, {}]  # ideal's and exact's, by sequence
        cases = []
        for event, hidden in zip(self._events, self._hidden, strict=True):
            taken = _Recorder(event, layer)
            for which, model in self._both():
                record = taken.of(which) if wanted else _ignore
                own = caches[which]
                if event.phase == PREFILL:
                    own[event.sequences[0]] = Cache()
                    hidden[which] = model.prefill_layer(
                        layer, hidden[which], own[event.sequences[0]], record
                    )
                else:
                    rows = [own[sequence] for sequence in event.sequences]
                    hidden[which] = model.decode_layer(
                        layer, hidden[which], event.positions, rows, record
                    )
            cases += taken.cases()
        return cases

    def final(self) -> list[Case]:
        cases = []
        for event, hidden in zip(self._events, self._hidden, strict=True):
            taken = _Recorder(event, None)
            for which, model in self._both():
                model.final(hidden[which], taken.of(which), last_only=event.phase == PREFILL)
            cases += taken.cases()
        return cases

    def _both(self) -> Iterable[tuple[int, Llama]]:
        return enumerate(self._models)


class FreeWalk:
    """The judges along the ideal's own greedy tokens: a source of tokens for the scheduler.

    Goes event by event through all layers. take: gets each event's cases, layer by layer; a case
    holds on to a layer's weights, so do not keep it.
    """

    def __init__(self, checkpoint: Checkpoint, take: Callable[[list[Case]], None]) -> None:
        self._models = ideal_and_exact(checkpoint)
        self._take = take
        self._layers = checkpoint.layers
        self._caches: dict[int, list[list[Cache]]] = {}  # slot -> [ideal, exact][layer]
        self._counts = {PREFILL: 0, DECODE: 0}
        self.tokens: list[list[int]] = []  # the ideal's, one list a prompt
        self.logits: list[list[tuple[Tensor, Tensor]]] = []  # (ideal, exact) behind each
        self._prompt_of: dict[int, int] = {}  # slot -> its list above

    def prefill(self, slot: int, prompt_index: int, tokens: tuple[int, ...], step: int) -> Emitted:
        self._caches[slot] = [[Cache() for _ in range(self._layers)] for _ in self._models]
        self._prompt_of[slot] = len(self.tokens)
        self.tokens.append([])
        self.logits.append([])
        event = self._event(PREFILL, (slot,), tuple(range(len(tokens))), tokens)
        return self._go(event)[0]

    def step(
        self, slots: tuple[int, ...], positions: tuple[int, ...], fed: tuple[int, ...], step: int
    ) -> list[Emitted]:
        return self._go(self._event(DECODE, slots, positions, fed))

    def _event(
        self, phase: str, slots: tuple[int, ...], positions: tuple[int, ...], fed: tuple[int, ...]
    ) -> Event:
        index = self._counts[phase]
        self._counts[phase] += 1
        return Event(phase, index, slots, positions, fed, np.empty(0, np.int32))

    def _go(self, event: Event) -> list[Emitted]:
        taken = _Recorder(event, None)
        hidden = [model.embed(event.tokens, taken.of(i)) for i, model in enumerate(self._models)]
        self._take(taken.cases())
        for layer in range(self._layers):
            taken = _Recorder(event, layer)
            for i, model in enumerate(self._models):
                caches = [self._caches[slot][i][layer] for slot in event.slots]
                if event.phase == PREFILL:
                    hidden[i] = model.prefill_layer(layer, hidden[i], caches[0], taken.of(i))
                else:
                    hidden[i] = model.decode_layer(
                        layer, hidden[i], event.positions, caches, taken.of(i)
                    )
            self._take(taken.cases())
        taken = _Recorder(event, None)
        last_only = event.phase == PREFILL
        results = [
            model.final(hidden[i], taken.of(i), last_only) for i, model in enumerate(self._models)
        ]
        self._take(taken.cases())
        (ideal, tokens), (exact, _) = results
        emitted = []
        for row, slot in enumerate(event.slots):
            at = -1 if last_only else row
            prompt = self._prompt_of[slot]
            self.tokens[prompt].append(int(tokens[row]))
            self.logits[prompt].append((ideal[at].clone(), exact[at].clone()))
            emitted.append(Emitted(slot, int(tokens[row]), float(ideal[at][tokens[row]])))
        return emitted


def _ignore(op: str, inputs: Mapping[str, Any], real: Tensor) -> None:
    """The record of a layer that nobody asked for."""


class _Recorder:
    """Takes down what the ideal (0) and the exact run (1) do at each tap of one event."""

    def __init__(self, event: Event, layer: int | None) -> None:
        self._event, self._layer = event, layer
        self._ideal: dict[str, tuple[Mapping[str, Any], Tensor]] = {}
        self._exact: dict[str, Tensor] = {}

    def of(self, which: int) -> Record:
        return self._take_exact if which else self._take_ideal

    def _take_ideal(self, op: str, inputs: Mapping[str, Any], real: Tensor) -> None:
        self._ideal[op] = (inputs, real)

    def _take_exact(self, op: str, inputs: Mapping[str, Any], real: Tensor) -> None:
        self._exact[op] = real

    def cases(self) -> list[Case]:
        taps = TAPS[DECODE if self._event.phase == DECODE else PREFILL]
        return [
            Case(self._event, taps[op], self._layer, MODEL_INPUT, inputs, real, self._exact[op])
            for op, (inputs, real) in self._ideal.items()
        ]
