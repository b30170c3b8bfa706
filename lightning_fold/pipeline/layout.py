"""Which decoder layers, embedding and head each pipeline stage owns: written out, or cut evenly.

    Et*3|(tt|)*2,L      stage 0: embedding, layers 0 1 2   stage 1: layers 3 4   stage 2: layers 5 6
                        stage 3: head

The grammar is Megatron-Core's (`PipelineParallelLayerLayout`, in its documentation "Custom
Pipeline Model Parallel Layout"), so its texts mean the same here: E embedding, t decoder layer,
m multi-token prediction layer, L final norm, LM head and loss; `|` ends a stage, `*N` repeats the
letter, the `|` or the parenthesised group before it, commas mean nothing, and stages may be empty.
Further legal here: spaces, groups in groups, groups without `*N`. Refused here: `*0`, and E and L
outside the first and the last stage, which read the batch and compute the loss.
Stages are numbered in order of the forward; which rank holds a stage is the schedule's affair.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from lightning_fold.pipeline.costs import LayerCosts
from lightning_fold.pipeline.even import even_cut

_NAMES = {
    "E": "embedding",
    "t": "decoder layer",
    "m": "multi-token prediction layer",
    "L": "final norm, LM head and loss",
    "|": "end of a stage",
}
_TOKEN = re.compile(r"[EtmL|()]|\*[\s,]*([0-9]*)")
_SEPARATORS = " ,\t\r\n"
# More characters, and more letters and bars when all is written out, than any layout has; without
# it `t*99999999999` would fill the memory.
_MOST_ITEMS = 10_000
_MOST_DIGITS = 9
_EXCERPT = 64

_Item = tuple[str, int]
"""A letter or bar, and where it stands in the text."""


@dataclass(frozen=True)
class StageLayers:
    """What one stage owns.

    Attributes:
        index: Stage in order of the forward.
        layers: Numbers of its decoder layers in the whole model, consecutive; may be empty.
        embedding: Whether it owns the token embedding; the first stage does.
        head: Whether it owns final norm, LM head and loss; the last stage does.
        mtp: Multi-token prediction layers.
    """

    index: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    mtp: int = 0

    def __str__(self) -> str:
        layers, mtp = _run("t", len(self.layers)), _run("m", self.mtp)
        return _join(["E" * self.embedding, layers, mtp, "L" * self.head])


@dataclass(frozen=True)
class Layout:
    """What every stage owns, each layer once and in order; `str` gives the shortest text of it.

    Attributes:
        stages: In order of the forward.
    """

    stages: tuple[StageLayers, ...]

    def __str__(self) -> str:
        texts = [str(stage) for stage in self.stages]
        runs = [_repeat_stage(text, len([*same])) for text, same in groupby(texts[:-1])]
        return _join([*runs, texts[-1]])

    def owner(self, layer: int) -> int:
        """Return the stage that owns a decoder layer.

        Raises:
            ValueError: There is no such layer.
        """
        for stage in self.stages:
            if layer in stage.layers:
                return stage.index
        count = sum(len(stage.layers) for stage in self.stages)
        raise ValueError(f"layer {layer} is in no stage of {self}. Legal layers: 0 to {count - 1}.")


def parse_layout(text: str, num_layers: int, *, num_stages: int, num_mtp: int = 0) -> Layout:
    """Read a layout.

    >>> str(parse_layout("Et,t,t| tt| tt| L", 7, num_stages=4))
    'Et*3|tt|tt|L'

    Args:
        text: See the module.
        num_layers: Decoder layers of the model.
        num_stages: pp times the virtual stages of a rank.
        num_mtp: Multi-token prediction layers of the model.

    Raises:
        ValueError: The text cannot be read, or does not fit the model or the number of stages.
    """
    items = _expand(text)
    _check_ends(text, items)
    _check_mtp(text, items, num_mtp)
    placed = sum(letter == "t" for letter, _ in items)
    if placed != num_layers:
        what = f"{placed} decoder layers (t) placed; the model has num_layers={num_layers}"
        raise _refuse(text, None, what)
    stages = _split(items)
    if len(stages) != num_stages:
        wanted = f"pipeline_parallel_size * virtual_pipeline_size = {num_stages}"
        fields = ("pipeline_layout", "pipeline_parallel_size", "virtual_pipeline_size")
        what = f"{len(stages)} stages are written (`|` ends one), but {wanted}"
        raise _refuse(text, None, what, fields)
    return _layout([stage["t"] for stage in stages], [stage["m"] for stage in stages])


def even_layout(
    costs: LayerCosts, num_stages: int, *, placement: Sequence[int] | None = None
) -> Layout:
    """Cut a model so that its dearest stage is as cheap as it can be.

    Every stage gets a layer at least; the embedding weighs on the first, the head on the last. A
    head dearer than several layers is better off alone, which `parse_layout` gives: `...|L`.
    Among cuts with an equal dearest stage the dearest ranks decide, where ranks hold several
    stages (`even.even_cut` says how well), then the sum of squares over stages, then that earlier
    stages get fewer layers.

    Args:
        costs: What embedding, layers and head weigh.
        num_stages: pp times the virtual stages of a rank.
        placement: Rank of each stage; by default each stage has a rank of its own.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    ranks = tuple(range(num_stages) if placement is None else placement)
    if len(costs.layers) < num_stages:
        raise ValueError(_explain_too_few(len(costs.layers), num_stages, len(set(ranks))))
    return _layout(even_cut(_whole_numbers(costs), ranks))


def _layout(counts: Sequence[int], mtp: Sequence[int] | None = None) -> Layout:
    """Build the layout in which stage s has `counts[s]` layers."""
    borders = [0, *accumulate(counts)]
    last = len(counts) - 1
    return Layout(
        tuple(
            StageLayers(
                index=stage,
                layers=tuple(range(borders[stage], borders[stage + 1])),
                embedding=stage == 0,
                head=stage == last,
                mtp=mtp[stage] if mtp else 0,
            )
            for stage in range(len(counts))
        )
    )


# Writing.


def _run(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"


def _repeat_stage(text: str, count: int) -> str:
    repeated = f"({text}|)*{count}" if text else f"|*{count}"
    return min(f"{text}|" * count, repeated, key=len)


def _join(pieces: Sequence[str]) -> str:
    """Join, with a comma where a letter would stand behind a number."""
    joined = ""
    for piece in pieces:
        joined += "," * (joined[-1:].isdigit() and piece[:1].isalpha()) + piece
    return joined


# Reading.


class _Reader:
    """Takes one token after another and repeats what is repeated."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.size = 0
        # Of each open group, the outermost being the text itself: where it opens, and its units,
        # which are what a `*N` behind them would repeat.
        self.groups: list[tuple[int, list[list[_Item]]]] = [(0, [])]
        self.is_repeatable = False

    def take(self, token: re.Match[str]) -> None:
        place, kind = token.start(), token[0][0]
        if kind == "(":
            self.groups.append((place, []))
        elif kind == ")":
            self._close(place)
        elif kind == "*":
            self._repeat(place, token[1])
        else:
            self._grow(place, 1)
            self.groups[-1][1].append([(kind, place)])
        self.is_repeatable = kind not in "(*"

    def finish(self) -> list[_Item]:
        opened, units = self.groups[-1]
        if len(self.groups) > 1:
            raise _refuse(self.text, opened, "this parenthesis is never closed")
        return [item for unit in units for item in unit]

    def _close(self, place: int) -> None:
        if len(self.groups) == 1:
            raise _refuse(self.text, place, "this parenthesis closes none")
        opened, units = self.groups.pop()
        if not units:
            raise _refuse(self.text, opened, "these parentheses hold nothing")
        joined = units[0] if len(units) == 1 else [item for unit in units for item in unit]
        self.groups[-1][1].append(joined)

    def _repeat(self, place: int, digits: str) -> None:
        if not self.is_repeatable:
            raise _refuse(self.text, place, "there is nothing before this `*` to repeat")
        if not digits:
            raise _refuse(self.text, place, "this `*` is followed by no number")
        times = int(digits) if len(digits.lstrip("0")) <= _MOST_DIGITS else _MOST_ITEMS + 1
        if times < 1:
            raise _refuse(self.text, place, "*0 leaves nothing; legal: *1 and more")
        units = self.groups[-1][1]
        self._grow(place, len(units[-1]) * (times - 1))
        units[-1] = units[-1] * times

    def _grow(self, place: int, items: int) -> None:
        self.size += items
        if self.size > _MOST_ITEMS:
            what = f"the layout grows beyond {_MOST_ITEMS} letters and bars here"
            raise _refuse(self.text, place, what)


def _expand(text: str) -> list[_Item]:
    """Letters and bars with all repetitions written out."""
    if len(text) > _MOST_ITEMS:
        raise _refuse(text, None, f"{len(text)} characters; legal: up to {_MOST_ITEMS}")
    reader, place = _Reader(text), 0
    while place < len(text):
        if text[place] in _SEPARATORS:
            place += 1
            continue
        token = _TOKEN.match(text, place)
        if token is None:
            items = ", ".join(f"{item} ({name})" for item, name in _NAMES.items())
            what = f"{text[place]!a} is no item of a layout. Legal: {items}, *N, ( and )"
            raise _refuse(text, place, what)
        reader.take(token)
        place = token.end()
    return reader.finish()


def _check_ends(text: str, items: Sequence[_Item]) -> None:
    for letter, index, end in (("E", 0, "first"), ("L", -1, "last")):
        places = [place for item, place in items if item == letter]
        where = f"{letter} ({_NAMES[letter]}) must stand once, {end} in the {end} stage"
        if len(places) != 1:
            second = places[1] if places else None
            raise _refuse(text, second, f"{where}; it stands {len(places)} times")
        if items[index][0] != letter:
            raise _refuse(text, places[0], f"{where}; it stands here")


def _check_mtp(text: str, items: Sequence[_Item], num_mtp: int) -> None:
    places = [place for item, place in items if item == "m"]
    if len(places) != num_mtp:
        what = f"{len(places)} m ({_NAMES['m']}) placed; the model has {num_mtp or 'none'}"
        raise _refuse(text, places[0] if places else None, what)
    letters = "".join(item for item, _ in items if item in "tm")
    if "mt" in letters:
        what = f"m ({_NAMES['m']}) must stand behind all t ({_NAMES['t']})"
        raise _refuse(text, places[0], what)


def _split(items: Sequence[_Item]) -> list[Counter[str]]:
    """Letters of each stage."""
    stages: list[Counter[str]] = [Counter()]
    for letter, _ in items:
        if letter == "|":
            stages.append(Counter())
        else:
            stages[-1][letter] += 1
    return stages


def _refuse(
    text: str, place: int | None, what: str, fields: Sequence[str] = ("pipeline_layout",)
) -> ValueError:
    """Say what is wrong, with the text around `place` and a caret under it."""
    start = max(0, (place or 0) - _EXCERPT // 2)
    shown = "".join(c if " " <= c <= "~" else "?" for c in text[start : start + _EXCERPT])
    lines = [f"pipeline_layout: {what}.", f"  {shown}"]
    if place is not None:
        lines.append(f"  {' ' * (place - start)}^ character {place + 1} of {len(text)}")
    *others, last = [f"`{field}`" for field in fields]
    named = f"{', '.join(others)} or {last}" if others else last
    return ValueError("\n".join([*lines, f"Change {named}."]))


# Cutting.


def _explain_too_few(num_layers: int, num_stages: int, pp: int) -> str:
    empty = _layout([1] * num_layers + [0] * (num_stages - num_layers))
    return (
        f"num_layers={num_layers} cannot be cut into pp * vpp = {pp} * {num_stages // pp} = "
        f"{num_stages} stages: {num_stages - num_layers} would have no layer.\n"
        f"Legal pp * vpp: at most {num_layers}, or a written layout with empty stages, such as "
        f"'{empty}'.\n"
        "Change `pipeline_parallel_size`, `virtual_pipeline_size` or `pipeline_layout`."
    )


def _whole_numbers(costs: LayerCosts) -> list[int]:
    """The layers' costs as integers in one ratio, in which equal cuts tie exactly.

    Embedding and head weigh on the layers beside them, which are always in the same stage.
    """
    pairs = [
        float(cost).as_integer_ratio() for cost in (costs.embedding, *costs.layers, costs.head)
    ]
    unit = math.lcm(*(denominator for _, denominator in pairs))
    embedding, *layers, head = [numerator * unit // denominator for numerator, denominator in pairs]
    layers[0] += embedding
    layers[-1] += head
    return layers
