"""What a call computes by torch and launches, noted so that it can be done again for other tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from intflash.quant import QTensor

Again = Callable[[Sequence[int]], None]  # launches with these addresses
Slots = list[Tensor | None]
Step = Callable[[Slots], None]

_UNFIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_ALIGNMENT = 256
_of_thread = threading.local()


def note(launch: Callable[[], tuple[Sequence[Tensor], Again]]) -> None:
    """Tell this thread's tape, if it has one, of a launch: its tensors, and what launches it on the same stream with
    other addresses of these."""
    tape = getattr(_of_thread, "tape", None)
    if tape is not None:
        tape.steps.append(_Launch(*launch()))


class Plan(NamedTuple):
    """The steps of a call over its tensors: the arguments, what the steps make, constants.

    Attributes:
        others: room for what the steps make, and the constants.
        steps: each reads and fills slots, and the slots that nobody needs after it.
        result: makes the call's result from the slots.
    """

    others: list[Tensor | None]
    steps: list[tuple[Step, list[int]]]
    result: Callable[[Slots], Any]

    def run(self, arguments: list[Tensor]) -> Any:
        slots = arguments + self.others
        for step, done in self.steps:
            step(slots)
            for i in done:
                slots[i] = None
        return self.result(slots)


class _Operation(NamedTuple):
    func: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: list[Tensor]


class _Launch(NamedTuple):
    tensors: Sequence[Tensor]
    again: Again


class Tape(TorchDispatchMode):
    """Notes this thread's torch operations and launches.

    Attributes:
        arguments: the tensors that will be others.
        steps: in their order.
        fits: a plan; not once the host has read a value from the device.
    """

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()
        self.arguments, self.steps, self.fits = arguments, [], True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports dynamo, for two seconds, to keep it out of what it never sees

    def __enter__(self) -> Tape:
        _of_thread.tape = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _of_thread.tape = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, outputs = list(leaves(args)), list(leaves(out))
        reads = inputs and not outputs or any(x.is_cuda for x in inputs) and not all(x.is_cuda for x in outputs)
        if reads or _UNFIT & set(func.tags) or any(isinstance(x, Tensor) for x in kwargs.values()):
            self.fits = False
        self.steps.append(_Operation(func, args, kwargs, outputs))
        return out

    def plan(self, result: Any) -> Plan | None:
        """What does all of it again and gives such a result; None where that would not be the same call."""
        if not self.fits or not any(isinstance(step, _Launch) for step in self.steps):
            return None
        return _Planner(self).plan(result)


class _Planner:
    """Tensors become slots; operations whose outputs nothing needs, as views that only give an address, go, and buffers
    that only launches see share one allocation."""

    def __init__(self, tape: Tape) -> None:
        self._arguments, self._tape = tape.arguments, tape.steps
        self._tensors = list(tape.arguments)
        self._slots = {id(x): i for i, x in reversed(list(enumerate(tape.arguments)))}
        self._bases: dict[int, int] = {}  # slot of a view -> of what it is a view of
        self._constants: set[int] = set()
        for step in tape.steps:
            if isinstance(step, _Operation):
                self._made(step)

    def _made(self, operation: _Operation) -> None:
        inputs = list(leaves(operation.args))
        for x in operation.outputs:
            if any(x is y for y in inputs):
                continue  # changed in place, or passed on
            if operation.func in _ALIASES:
                self._slots[id(x)] = self._slot(inputs[0])
                continue
            base = next((self._slot(y) for y in inputs if _memory(y) == _memory(x)), None)
            slot = self._new_slot(x)
            if base is not None:
                self._bases[slot] = base

    def _new_slot(self, x: Tensor) -> int:
        self._tensors.append(x)
        self._slots[id(x)] = len(self._tensors) - 1
        return len(self._tensors) - 1

    def _slot(self, x: Tensor) -> int:
        """Of any tensor; one that is neither an argument nor made by an operation is a constant."""
        if id(x) in self._slots:
            return self._slots[id(x)]
        slot = self._new_slot(x)
        self._constants.add(slot)
        return slot

    def _place(self, x: Tensor) -> tuple[int, int]:
        """The slot of the tensor whose memory x lies in, and how far in."""
        slot = self._slot(x)
        while slot in self._bases:
            slot = self._bases[slot]
        return slot, x.data_ptr() - self._tensors[slot].data_ptr()

    def plan(self, result: Any) -> Plan | None:
        results = [self._slot(x) for x in leaves(result)]
        kept, seen = self._needed(results)
        memory = set(map(_memory, self._arguments))
        if any(_memory(self._tensors[slot]) in memory for slot in self._constants):
            return None  # an argument that reached a launch unseen
        steps, hidden = self._buffers(kept, seen)
        uses: list[set[int]] = [set() for _ in steps]
        for step in kept:
            if isinstance(step, _Launch):
                places = [self._place(x) for x in step.tensors]
                moved = [hidden.get(slot, (slot, 0)) for slot, _ in places]
                places = [(slot, start + offset) for (slot, start), (_, offset) in zip(moved, places, strict=True)]
                steps.append(_launch_step(step.again, places))
                uses.append({slot for slot, _ in places})
            elif not hidden.keys() & set(map(self._slot, step.outputs)):
                slots = [[self._slot(x) for x in leaves(y)] for y in (step.args, step.outputs)]
                steps.append(_operation_step(step, *slots))
                uses.append(set(slots[0] + slots[1]))
        others = [x if i in self._constants else None for i, x in enumerate(self._tensors)][len(self._arguments) :]
        return Plan(others, list(zip(steps, _last(uses, results), strict=True)), _pick(result, results))

    def _needed(self, results: list[int]) -> tuple[list[_Operation | _Launch], set[int]]:
        """The steps that the result and the launches need, and the slots that operations read or the result holds."""
        needed, seen, kept = set(results), set(results), []
        for step in reversed(self._tape):
            if isinstance(step, _Launch):
                needed.update(self._place(x)[0] for x in step.tensors)
            elif step.func not in _ALIASES and (
                step.func._schema.is_mutable or needed.intersection(map(self._slot, step.outputs))
            ):
                inputs = set(map(self._slot, leaves(step.args)))
                needed |= inputs
                seen |= inputs
            else:
                continue
            kept.append(step)
        return kept[::-1], seen

    def _buffers(
        self, kept: list[_Operation | _Launch], seen: set[int]
    ) -> tuple[list[Step], dict[int, tuple[int, int]]]:
        """What allocates the memory that only launches see, and where its slots lie in that."""
        sizes = {
            self._slot(x): x.untyped_storage().nbytes()
            for step in kept
            if isinstance(step, _Operation) and step.func is torch.ops.aten.empty.memory_format
            for x in step.outputs
            if self._slot(x) not in seen and x.device == self._arguments[0].device
        }
        if not sizes:
            return [], {}
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()))
        make = partial(torch.empty, ends[-1], dtype=torch.uint8, device=self._arguments[0].device)
        shared = self._new_slot(make())

        def step(slots: Slots) -> None:
            slots[shared] = make()

        return [step], {slot: (shared, start) for slot, start in zip(sizes, [0, *ends], strict=False)}


def _last(uses: list[set[int]], results: list[int]) -> list[list[int]]:
    """For each step the slots that neither a later one nor the result needs."""
    later, done = set(results), []
    for used in reversed(uses):
        done.append(sorted(used - later))
        later |= used
    return done[::-1]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _launch_step(again: Again, places: list[tuple[int, int]]) -> Step:
    def step(slots: Slots) -> None:
        again([slots[slot].data_ptr() + offset for slot, offset in places])

    return step


def _operation_step(operation: _Operation, inputs: list[int], outputs: list[int]) -> Step:
    func, args, kwargs, _ = operation
    fill = nest(args)
    if fill is None:
        make = partial(func, *args, **kwargs)

        def run(slots: Slots) -> Any:
            return make()
    else:

        def run(slots: Slots) -> Any:
            return func(*fill(iter([slots[i] for i in inputs])), **kwargs)

    def step(slots: Slots) -> None:
        made = run(slots)
        if isinstance(made, Tensor):
            slots[outputs[0]] = made
        else:
            for i, x in zip(outputs, leaves(made), strict=True):
                slots[i] = x

    return step


def _pick(result: Any, slots: list[int]) -> Callable[[Slots], Any]:
    fill = nest(result)
    return lambda values: fill(iter([values[i] for i in slots]))


def nest(x: Any) -> Callable[[Iterator[Any]], Any] | None:
    """What makes x, which holds tensors in tuples, lists and QTensors, with an iterator's next things for the tensors;
    None where x holds none."""
    if isinstance(x, Tensor):
        return next
    if isinstance(x, QTensor):
        return lambda things: QTensor(next(things), next(things), x.granularity, x.block_size, x.bits)
    if not isinstance(x, tuple | list):
        return None
    makers = [nest(item) for item in x]
    if not any(makers):
        return None
    kind = list if isinstance(x, list) else tuple
    others = [None if maker else item for maker, item in zip(makers, x, strict=True)]
    if makers[0] is next and not any(makers[1:]):  # as in most: a pointer and its strides
        rest = others[1:]
        return lambda things: kind([next(things), *rest])
    pairs = list(zip(makers, others, strict=True))
    return lambda things: kind([maker(things) if maker else other for maker, other in pairs])


def leaves(x: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in the order in which `nest` asks for them."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, QTensor):
        yield from (x.data, x.scale)
    elif isinstance(x, tuple | list):
        for item in x:
            yield from leaves(item)
