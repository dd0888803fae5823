"""Runs a program on a GPU: one captured graph for each shape of the inputs."""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intflash.backends import get_backend, select, why_not
from intflash.backends.gpu.tensors import Statistics
from intflash.integer.attend import attention_problem
from intflash.integer.gpu import hopper, kernels, padding
from intflash.integer.program import Attention, Embedding, LayerNorm, Linear, Operation, Patches, Pool, Program
from intflash.problem import Problem

MAX_GRAPHS = 16  # of a program; the one that was not used for longest is given up
Read = Callable[[dict[str, Tensor]], Any]  # what a call returns, of the outputs' buffers, which it must copy

_loaded: weakref.WeakKeyDictionary[Program, LoadedProgram] = weakref.WeakKeyDictionary()
_loading = threading.Lock()


def run(program: Program, inputs: Mapping[str, Tensor], read: Read | None = None) -> Any:
    """See `intflash.integer.gpu.run`."""
    loaded = _loaded.get(program)
    if loaded is None:
        with _loading:
            loaded = _loaded.setdefault(program, LoadedProgram(program))
    return loaded.run(inputs, read)


class Forward(NamedTuple):
    """A captured forward pass.

    Attributes:
        inputs: those that the graph reads, by name: masks.
        made: what the first operations make of the other inputs. They are launched before the graph, so that they read
            the caller's tensors.
        outputs: what the graph writes.
    """

    inputs: dict[str, Tensor]
    made: dict[str, Tensor]
    outputs: dict[str, Tensor]
    graph: torch.cuda.CUDAGraph


class LoadedProgram:
    """A program with everything that is computed once: launch constants of attention, rows that no product writes.

    Calls are serialized, on the device too: all graphs share their memory.
    """

    def __init__(self, program: Program) -> None:
        self._inputs = program.inputs
        self._outputs = {o.buffer: program.buffers[o.buffer] for o in program.outputs}
        self._steps = Steps(program)
        self._forwards: collections.OrderedDict[tuple, Forward] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._pool = None
        self._last: tuple[int, torch.cuda.Stream, torch.cuda.Event] | None = None  # the latest call

    def run(self, inputs: Mapping[str, Tensor], read: Read | None) -> Any:
        """The buffers of the program's outputs, which the caller owns, or what `read` makes of them."""
        given = {i.name: inputs[i.name] for i in self._inputs if inputs.get(i.name) is not None}
        first = next(iter(given.values()))
        if first.is_cuda and len(first):
            with torch.cuda.device(first.device):
                if not torch.cuda.is_current_stream_capturing():
                    plain = {name: x if type(x) is Tensor else x.as_subclass(Tensor) for name, x in given.items()}
                    with self._lock:
                        return self._replay(plain, read or _copies)
                found = self._steps.run(given)
        elif len(first):
            found = self._steps.run(given)
        else:
            empty = {name: torch.empty(0, *b.shape, dtype=b.dtype) for name, b in self._outputs.items()}
            found = {name: x.to(first.device) for name, x in empty.items()}
        return found if read is None else read(found)

    def _replay(self, given: dict[str, Tensor], read: Read) -> Any:
        raw = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())  # current_stream takes 7 us
        if self._last is None or self._last[0] != raw:
            stream = torch.cuda.current_stream()
            if self._last is not None:
                stream.wait_event(self._last[2])
            self._last = raw, stream, torch.cuda.Event()
        forward = self._forward(given)
        self._steps.first(given, forward.made)
        for name, x in forward.inputs.items():
            x.copy_(given[name])
        forward.graph.replay()
        found = read(forward.outputs)
        self._last[2].record(self._last[1])
        return found

    def _forward(self, given: dict[str, Tensor]) -> Forward:
        """The forward pass of these shapes, captured at their first call."""
        shapes = tuple((x.shape, x.dtype, x.device) for x in given.values())
        forward = self._forwards.get(shapes)
        if forward is None:
            with torch.inference_mode(False), torch.no_grad():
                forward = self._forwards[shapes] = self._capture(given)
            if len(self._forwards) > MAX_GRAPHS:
                self._forwards.popitem(last=False)
        self._forwards.move_to_end(shapes)
        return forward

    def _capture(self, given: dict[str, Tensor]) -> Forward:
        steps, names = self._steps, self._steps.inputs_of_rest
        inputs = {name: x.clone(memory_format=torch.contiguous_format) for name, x in given.items() if name in names}
        steps.run(given)  # compiles, and computes what is computed once
        made = steps.first(given)
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may go on using the device
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = steps.rest(made, inputs)
        return Forward(inputs, made, outputs, graph)


def _copies(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in found.items()}


class Run(NamedTuple):
    """What one forward pass has: buffers, inputs, and the order of kept keys by the mask's name."""

    values: dict[str, Tensor]
    inputs: Mapping[str, Tensor]
    key_orders: dict[str, padding.KeyOrder]


class Steps:
    """The launches of a forward pass.

    Args:
        program: a checked one. Its tensors are kept, the program is not.
    """

    def __init__(self, program: Program) -> None:
        self._program = replace(program)  # a copy, so that the cache of programs lets the caller's go
        self._last = program.last_uses()
        self._first = [op for op in program.operations if isinstance(op, _FIRST)]
        self._rest = [op for op in program.operations if not isinstance(op, _FIRST)]
        self.inputs_of_rest = {op.mask for op in self._rest if isinstance(op, Attention)}
        self._attention: dict[str, tuple] = {}  # operation -> launch constants
        self._kept = {op.name: _kept_rows(program, op) for op in program.operations if isinstance(op, Linear)}
        pairs = zip(program.operations, program.operations[1:], strict=False)
        self._pairs = {a.name: b for a, b in pairs if _same_norm(program, a, b)}  # codes and a stream of the same rows
        weights = {op.name: program.tensors[op.weight] for op in program.operations if isinstance(op, Linear)}
        self._hopper = {name: hopper.padded(weight) for name, weight in weights.items() if hopper.serves(weight)}
        device = next(iter(program.tensors.values())).device
        self._pools = {
            op.name: torch.tensor([op.multiplier], dtype=torch.int32, device=device)
            for op in program.operations if isinstance(op, Pool)
        }  # fmt: skip

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of the program's outputs. Launches on the current stream; reads no value back."""
        return self.rest(self.first(inputs), inputs)

    def first(self, inputs: Mapping[str, Tensor], made: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What the operations write that read only inputs, in these buffers if given."""
        run = Run(dict(made or {}), inputs, {})
        for op in self._first:
            run.values.update(_STEPS[type(op)](self, op, run))
        return run.values

    def rest(self, made: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of the program's outputs from what `first` made."""
        program, run = self._program, Run(dict(made), inputs, {})
        order = {op.name: i for i, op in enumerate(program.operations)}
        for op in self._rest:
            run.values.update(_STEPS[type(op)](self, op, run))
            for name in [name for name in run.values if self._last[name] <= order[op.name]]:
                del run.values[name]
        found = {output.buffer: run.values[output.buffer] for output in program.outputs}
        return {name: x.reshape(len(x), *program.buffers[name].shape) for name, x in found.items()}

    def _tensor(self, name: str | None) -> Tensor | None:
        return None if name is None else self._program.tensors[name]

    def _empty(self, name: str, like: Tensor) -> Tensor:
        buffer = self._program.buffers[name]
        return torch.empty((len(like), *buffer.shape), dtype=buffer.dtype, device=like.device)

    def _patches(self, op: Patches, run: Run) -> dict[str, Tensor]:
        image = run.inputs[op.image].contiguous()
        out = run.values[op.out] if op.out in run.values else self._empty(op.out, image)
        inverse = float(1.0 / torch.tensor(op.scale, dtype=torch.float32))
        kernels.patches_launch(image, out, op.patch, inverse, op.zero_point).run()
        return {op.out: out}

    def _embedding(self, op: Embedding, run: Run) -> dict[str, Tensor]:
        indices = tuple(run.inputs[name].contiguous() for name in op.indices)
        out = run.values[op.out] if op.out in run.values else self._empty(op.out, indices[0])
        tables = tuple(map(self._tensor, op.tables))
        limits = self._program.buffers[op.out].limits
        kernels.embedding_launch(indices, tables, self._tensor(op.rows), out, limits).run()
        return {op.out: out}

    def _layer_norm(self, op: LayerNorm, run: Run) -> dict[str, Tensor]:
        if op.out in run.values:
            return {}  # it was made with the operation before
        x, second = run.values[op.x], self._pairs.get(op.name)
        made = self._scaled(op, x)
        load_rows = self._tensor(op.load_rows)
        arguments = x, made.multiplier, made.bias, made.out, load_rows, op.shift, op.eps, made.limits
        if not hopper.serves_layer_norm(x, made.out, load_rows):
            kernels.layer_norm_launch(*arguments).run()
            return {op.out: made.out}
        other = None if second is None else self._scaled(second, x)
        hopper.layer_norm_launch(*arguments, other).run()
        return {op.out: made.out} | ({} if second is None else {second.out: other.out})

    def _scaled(self, op: LayerNorm, x: Tensor) -> hopper.Scaled:
        limits = self._program.buffers[op.out].limits
        return hopper.Scaled(
            self._tensor(op.multiplier), self._tensor(op.bias), self._empty(op.out, x), op.shift, limits
        )

    def _pool(self, op: Pool, run: Run) -> dict[str, Tensor]:
        x, limits = run.values[op.x], self._program.buffers[op.out].limits
        out = self._empty(op.out, x)
        kernels.pool_launch(x, out, op.first, op.stop, self._pools[op.name], op.shift, limits).run()
        return {op.out: out}

    def _linear(self, op: Linear, run: Run) -> dict[str, Tensor]:
        x, weight, buffer = run.values[op.x], self._tensor(op.weight), self._program.buffers[op.out[0]]
        batch, (n, k) = len(x), weight.shape
        if len(buffer.shape) == 4:  # queries, keys and values stay side by side in the rows of one matrix
            out = torch.empty((batch, math.prod(x.shape[1:]) // k, n), dtype=torch.int8, device=x.device)
        else:
            out = self._empty(op.out[0], x)
        residual = self._tensor(op.residual) if op.residual in self._program.tensors else run.values.get(op.residual)
        store_rows, kept = self._tensor(op.store_rows), self._kept[op.name]
        constants = map(self._tensor, (op.bias, op.multiplier, op.table))
        module = hopper if op.name in self._hopper else kernels
        weight = self._hopper.get(op.name, weight)
        rows = out.view(batch, -1, n)
        x = x.reshape(-1, k)
        module.linear_launch(op, x, weight, *constants, residual, store_rows, rows, buffer).run()
        if kept is not None:
            out.index_copy_(1, kept.at, kept.of(residual, batch))
        if len(buffer.shape) != 4:
            return {op.out[0]: out}
        s, heads, tokens, head_dim = buffer.shape
        split = out.view(batch, s, tokens, len(op.out), heads, head_dim).permute(3, 0, 1, 4, 2, 5)
        return dict(zip(op.out, split, strict=True))

    def _attend(self, op: Attention, run: Run) -> dict[str, Tensor]:
        q, k, v = (run.values[name].flatten(0, 1) for name in (op.q, op.k, op.v))  # [B * S, heads, N, D]
        problem, order = attention_problem(self._program, op, q, k, v, run.inputs), None
        if padding.serves(problem):
            if op.mask not in run.key_orders:
                run.key_orders[op.mask] = padding.key_order(problem.keep[:, 0, 0])
            order = run.key_orders[op.mask]
            problem = padding.without_masked_keys(problem, order)
        windows, heads, tokens, head_dim = q.shape
        out = self._empty(op.out, run.values[op.q])
        rows = out.view(windows, tokens, heads, head_dim).transpose(1, 2)
        constants = self._attention.get(op.name)
        attend = _attend_by_cuda if _is_for_cuda(problem) else _attend_by_triton
        self._attention[op.name] = attend(problem, rows, constants, None if order is None else order.counts)
        return {op.out: out}


def _same_norm(program: Program, a: Operation, b: Operation) -> bool:
    """Whether two operations are LayerNorms of the same rows, which one launch can scale twice."""
    if not isinstance(a, LayerNorm) or not isinstance(b, LayerNorm):
        return False
    few = program.buffers[a.out].shape[-1] <= hopper.MOST_CHANNELS_OF_TWO
    return few and (a.x, a.load_rows, a.eps) == (b.x, b.load_rows, b.eps)


def _is_for_cuda(problem: Problem) -> bool:
    return why_not(get_backend("cuda"), problem) is None


def _attend_by_cuda(problem: Problem, out: Tensor, constants: Any, key_counts: Tensor | None) -> Any:
    """Computes a problem of codes, and returns its launch constants, which a later call takes.

    Args:
        key_counts: how many keys each batch has, or None.
    """
    from intflash.backends.cuda import backend

    if constants is None:
        plan = backend.planned(problem, key_counts=key_counts, only_constants=True)
        plan.run()
        constants = plan.constants
    backend.planned(problem, out=out, constants=constants, key_counts=key_counts).run()
    return constants


def _attend_by_triton(problem: Problem, out: Tensor, constants: Any, key_counts: None) -> Any:
    """As `_attend_by_cuda`.

    Raises:
        BackendError: Triton does not serve the problem; the message says why.
    """
    select(problem, "triton")
    from intflash.backends.triton import backend

    if constants is None:
        launch, constants, _ = backend.KERNELS.constants(problem, None)
        launch.run()
    backend.KERNELS.attention(problem, constants, out, Statistics(None, None), None).run()
    return constants


class KeptRows(NamedTuple):
    """The rows of a residual that no product row is added to, int64, and their values where they are constant."""

    at: Tensor
    values: Tensor | None

    def of(self, residual: Tensor, batch: int) -> Tensor:
        return residual.index_select(1, self.at) if self.values is None else self.values.expand(batch, -1, -1)


def _kept_rows(program: Program, op: Linear) -> KeptRows | None:
    if op.store_rows is None:
        return None
    rows = program.tensors[op.store_rows]
    kept = torch.ones(program.buffers[op.out[0]].shape[0], dtype=torch.bool)
    kept[rows.cpu().long()] = False
    if not bool(kept.any()):
        return None
    at, constant = kept.nonzero().flatten().to(rows.device), program.tensors.get(op.residual)
    return KeptRows(at, None if constant is None else constant[at])


_FIRST = Patches, Embedding  # read only inputs
_STEPS: dict[type, Callable[..., dict[str, Tensor]]] = {
    Patches: Steps._patches,
    Embedding: Steps._embedding,
    Linear: Steps._linear,
    LayerNorm: Steps._layer_norm,
    Attention: Steps._attend,
    Pool: Steps._pool,
}
