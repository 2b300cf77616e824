"""The reference scheduler against what the upstream program printed, and case by case."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from reference.scheduler import (
    NUM_BLOCKS,
    Emitted,
    Event,
    ForcedTokens,
    Page,
    Prefill,
    Refill,
    Scheduler,
    Step,
)

ENGINE = json.loads((Path(__file__).parents[1] / "golden" / "engine.json").read_text())
PROMPTS = ENGINE["prompts"]
END = 128009


@dataclass
class Replay:
    """Tokens in the order in which they were printed."""

    lines: list[tuple[str, int]]
    used: int = 0

    def _next(self, slot: int) -> Emitted:
        logit, token = self.lines[self.used]
        self.used += 1
        return Emitted(slot, token, float(logit))

    def prefill(self, slot: int, prompt_index: int, tokens: tuple[int, ...], step: int) -> Emitted:
        return self._next(slot)

    def step(
        self, slots: tuple[int, ...], positions: tuple[int, ...], fed: tuple[int, ...], step: int
    ) -> list[Emitted]:
        return [self._next(slot) for slot in slots]


@dataclass
class Script:
    """Token 7 always, but where told: prompt index -> tokens of that prompt's generation."""

    told: dict[int, list[int]] = field(default_factory=dict)
    prompt_of: dict[int, int] = field(default_factory=dict)

    def _next(self, slot: int) -> Emitted:
        rest = self.told.get(self.prompt_of[slot], [])
        return Emitted(slot, rest.pop(0) if rest else 7)

    def prefill(self, slot: int, prompt_index: int, tokens: tuple[int, ...], step: int) -> Emitted:
        self.prompt_of[slot] = prompt_index
        return self._next(slot)

    def step(
        self, slots: tuple[int, ...], positions: tuple[int, ...], fed: tuple[int, ...], step: int
    ) -> list[Emitted]:
        return [self._next(slot) for slot in slots]


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[100 + i] * n for i, n in enumerate(lengths)]


def check_conservation(scheduler: Scheduler, events: Sequence[Event]) -> None:
    """No block in two places, none lost, and the events account for every one that moved."""
    held = scheduler.host_table[scheduler.host_table != -1].tolist()
    assert sorted(held + scheduler.free_blocks) == list(range(NUM_BLOCKS))
    out: Counter[Page] = Counter()
    for event in events:
        out.update(event.popped)
        out.subtract(event.pushed)
    in_table = {
        Page(*(int(i) for i in where), int(scheduler.host_table[tuple(where)]))
        for where in np.argwhere(scheduler.host_table != -1)
    }
    assert {page for page, count in out.items() if count} == in_table
    assert set(out.values()) <= {0, 1}


# ---- the upstream program -----------------------------------------------------------------


@pytest.mark.parametrize("run", [k for k, v in ENGINE["engine"].items() if isinstance(v, list)])
def test_upstreams_prints_come_out_in_its_order(run: str):
    lines = ENGINE["engine"][run]
    source = Replay(lines)
    scheduler = Scheduler(PROMPTS, source, max_seq_len=ENGINE["engine"]["max_seq_len"])
    events = list(scheduler.run())
    assert source.used == len(lines)
    printed = [emitted.line for event in events for emitted in event.emitted]
    form = ENGINE["engine"]["line"]
    assert printed == [form.replace("<logit>", a).replace("<id>", str(b)) for a, b in lines]
    at = np.cumsum([0] + [len(event.emitted) for event in events])
    prefills = [int(n) for n, event in zip(at, events, strict=False) if isinstance(event, Prefill)]
    assert prefills == [0, 1, 64, 71]
    assert [type(event) for event in events if isinstance(event, Prefill)] == [
        Prefill,
        Prefill,
        Refill,
        Refill,
    ]
    assert len(scheduler.free_blocks) == NUM_BLOCKS
    check_conservation(scheduler, events)


# ---- pages --------------------------------------------------------------------------------


def test_prefill_takes_blocks_layer_by_layer_from_the_end_of_the_list():
    scheduler = Scheduler(prompts_of(17, 3), Script(), layers=2)
    events = scheduler.run()
    first, second = next(events), next(events)
    assert first.popped == (
        Page(0, 0, 0, 65535),
        Page(0, 0, 1, 65534),
        Page(0, 1, 0, 65533),
        Page(0, 1, 1, 65532),
    )
    assert second.popped == (Page(1, 0, 0, 65531), Page(1, 1, 0, 65530))
    assert first.host_table[0, :2, :3].tolist() == [[65535, 65534, -1], [65533, 65532, -1]]
    assert (first.host_table[1] == -1).all()
    assert (first.host_table[0, 2:] == -1).all()
    assert first.host_table.shape == (2, 16, 128)
    assert first.host_table.dtype == np.int32


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_prompt_takes_a_block_for_each_16_tokens_begun(length: int, pages: int):
    scheduler = Scheduler(prompts_of(length), Script(), layers=1)
    assert len(next(scheduler.run()).popped) == pages


def test_decode_takes_a_block_a_layer_when_a_page_begins_slots_in_order_within_a_layer():
    scheduler = Scheduler(prompts_of(15, 16), Script(), layers=2)
    events = [e for e in scheduler.run(max_steps=18) if isinstance(e, Step)]
    assert {e.index: e.popped for e in events if e.popped} == {
        0: (Page(1, 0, 1, 65531), Page(1, 1, 1, 65530)),
        1: (Page(0, 0, 1, 65529), Page(0, 1, 1, 65528)),
        16: (Page(1, 0, 2, 65527), Page(1, 1, 2, 65526)),
        17: (Page(0, 0, 2, 65525), Page(0, 1, 2, 65524)),
    }


def test_both_slots_take_blocks_layer_by_layer_in_one_step():
    scheduler = Scheduler(prompts_of(16, 16), Script(), layers=2)
    step = list(scheduler.run(max_steps=1))[-1]
    assert [(page.layer, page.slot) for page in step.popped] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_ended_slot_gives_blocks_back_layer_by_layer_and_the_next_takes_the_last_first():
    source = Script({0: [7, END]})
    scheduler = Scheduler(prompts_of(17, 3, 20), source, layers=2)
    events = list(scheduler.run(max_steps=2))
    ending = next(e for e in events if e.freed)
    assert ending.freed == (0,)
    assert [page.block for page in ending.pushed] == [65535, 65534, 65533, 65532]
    assert (ending.host_table[0] == -1).all()
    assert (ending.device_table == ending.host_table).all()
    refill = next(e for e in events if isinstance(e, Refill))
    assert (refill.slot, refill.prompt_index) == (0, 2)
    assert [page.block for page in refill.popped] == [65532, 65533, 65534, 65535]
    check_conservation(scheduler, events)


def test_tables_of_an_event_do_not_change_afterwards():
    scheduler = Scheduler(prompts_of(16, 3), Script(), layers=1)
    first = next(run := scheduler.run())
    before = first.host_table.copy()
    list(zip(range(5), run, strict=False))
    np.testing.assert_array_equal(first.host_table, before)
    np.testing.assert_array_equal(first.device_table, before)


# ---- slots --------------------------------------------------------------------------------


def test_a_step_feeds_the_last_tokens_at_the_positions_after_what_is_cached():
    source = Script({0: [11, 12], 1: [21, 22]})
    scheduler = Scheduler(prompts_of(5, 9), source, layers=1)
    steps = [e for e in scheduler.run(max_steps=2) if isinstance(e, Step)]
    assert [s.active_slots for s in steps] == [(0, 1), (0, 1)]
    assert [s.positions for s in steps] == [(5, 9), (6, 10)]
    assert [s.seq_lens for s in steps] == [(6, 10), (7, 11)]
    assert [s.tokens_fed for s in steps] == [(11, 21), (12, 22)]
    assert [s.lengths for s in steps] == [(6, 10), (7, 11)]
    assert scheduler.generated == [[11, 12, 7], [21, 22, 7]]


@pytest.mark.parametrize("token", [128001, 128009])
def test_an_end_token_in_decode_ends_its_slot_and_is_not_kept(token: int):
    source = Script({0: [11, token]})
    scheduler = Scheduler(prompts_of(5, 9), source, layers=1)
    steps = [e for e in scheduler.run(max_steps=2) if isinstance(e, Step)]
    assert steps[0].freed == (0,)
    assert steps[0].free == (True, False)
    assert steps[1].active_slots == (1,)
    assert steps[1].positions == (10,)
    assert scheduler.generated[0] == [11]


def test_a_slot_ends_after_the_last_position():
    scheduler = Scheduler(prompts_of(46), Script(), layers=1, max_seq_len=48)
    events = list(scheduler.run())
    assert [e.positions for e in events[1:]] == [(46,), (47,)]
    assert events[-1].freed == (0,)
    assert scheduler.generated[0] == [7, 7]  # the last one was printed, not kept
    assert len(scheduler.free_blocks) == NUM_BLOCKS


def test_the_engine_goes_on_from_an_end_token_that_prefill_emits():
    source = Script({0: [END, 12]})
    scheduler = Scheduler(prompts_of(5), source, layers=1, eos_after_prefill=False)
    prefill, step = scheduler.run(max_steps=1)
    assert prefill.freed == ()
    assert step.tokens_fed == (END,)


def test_a_right_engine_ends_a_slot_whose_prefill_emits_an_end_token():
    source = Script({0: [END]})
    scheduler = Scheduler(prompts_of(17, 5, 6), source, layers=1)
    events = list(scheduler.run(max_steps=1))
    assert events[0].freed == (0,)
    assert events[0].pushed == events[0].popped
    assert (events[0].device_table == -1).all()
    assert [type(e) for e in events] == [Prefill, Prefill, Refill, Step]
    assert events[2].slot == 0
    assert events[3].active_slots == (0, 1)
    check_conservation(scheduler, events)


def test_the_queue_is_emptied_even_if_every_prefill_ends():
    source = Script({i: [END] for i in range(5)})
    scheduler = Scheduler(prompts_of(3, 3, 3, 3, 3), source, layers=1)
    events = list(scheduler.run())
    assert [e.prompt_index for e in events] == [0, 1, 2, 3, 4]
    assert [e.slot for e in events] == [0, 1, 0, 1, 0]
    assert scheduler.steps == 0


def test_no_prompts_no_events():
    assert list(Scheduler([], Script()).run()) == []


# ---- tokens and lines ---------------------------------------------------------------------


def test_forced_ids_feed_id_k_in_step_k_and_wrap():
    scheduler = Scheduler(prompts_of(5, 9), ForcedTokens([[1, 2, 3], [4, 5]]), layers=1)
    events = list(scheduler.run(max_steps=4))
    assert [e.tokens_fed for e in events[2:]] == [(1, 4), (2, 5), (3, 4), (1, 5)]
    assert events[0].emitted == (Emitted(0, 1),)
    assert events[0].emitted[0].line is None


def test_forced_ids_are_tested_for_the_end():
    scheduler = Scheduler(prompts_of(5, 9), ForcedTokens([[1, END], [4, 5]]), layers=1)
    events = list(scheduler.run(max_steps=2))
    assert events[2].freed == (0,)
    assert events[3].active_slots == (1,)


@pytest.mark.parametrize(
    ("logit", "text"),
    [
        (4.4375, "4.4375"),
        (float("nan"), "nan"),
        (4.0, "4"),
        (3.7343750, "3.73438"),
        (1e-6, "1e-06"),
    ],
)
def test_lines_show_six_significant_digits(logit: float, text: str):
    assert Emitted(0, 5, logit).line == f"Output token: {text}, token index: 5"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layers": 0}, "layers must be 1 to 16"),
        ({"layers": 17}, "layers must be 1 to 16"),
        ({"max_seq_len": 50}, "max_seq_len must be a multiple of 16"),
        ({"max_seq_len": 16}, "prompts must have 1 to 15 ids"),
    ],
)
def test_impossible_schedules_are_refused(options: dict[str, int], match: str):
    with pytest.raises(ValueError, match=match):
        Scheduler(prompts_of(16), Script(), **options)
