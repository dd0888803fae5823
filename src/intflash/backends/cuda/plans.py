"""The launches of a problem, as the native module plans them (csrc/host/cuda/): which kernels, their macros, grids,
shared memory and parameters. Planning needs no GPU: tensors may be on any device, and those on `meta` get made-up
addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intflash.backends import native
from intflash.backends.cuda.program import CudaLaunch, CudaProgram, capability, multiprocessors, shared_memory
from intflash.backends.cuda.tensor_maps import TensorMap
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

# Choices that tests fix, because results must not depend on them: `Fixed` of csrc/host/cuda/plan.h has their names.
Choice = int | tuple[int, ...] | str
FIXED: dict[str, Choice] = {}


class Found(NamedTuple):
    """Which kernel serves a problem, or why none does.

    Attributes:
        kernel: "window", "short_rows", "long_rows", "whole_rows", "few_rows" or "any_rows"; None where none does.
        refusal: why there is none.
        copies: fields of the problem of whose tensors the kernel needs copies, see `backend.with_copies`.
    """

    kernel: str | None
    refusal: str | None
    copies: tuple[str, ...]


class Constants(NamedTuple):
    """The packed constants of a plan that has run, for later plans of problems with the same scales: (address, shape)
    of each, or None where there are none, and what keeps their memory.
    """

    score: tuple[int, tuple[int, ...]] | None
    output: tuple[int, tuple[int, ...]] | None
    kept: tuple[Tensor, ...]


@dataclass(frozen=True)
class Plan:
    """The launches of a problem in their order, and what they fill in.

    Attributes:
        out, out_scale: the output, and its scale where it is integer. On `meta` there are none.
        t_max, l: of every row, int64 and int32, where the problem returns log-sum-exp.
        workspace: (address, bytes) of each part of the launches' working memory.
    """

    launches: tuple[CudaLaunch, ...]
    constants: Constants
    workspace: tuple[tuple[int, int], ...]
    out: Tensor | None
    out_scale: Tensor | None
    t_max: Tensor | None
    l: Tensor | None

    def run(self) -> None:
        """Queues all launches on the current stream of their device."""
        for launch in self.launches:
            launch.run()


def gpu_of(device: torch.device) -> tuple[int, int, int, int]:
    """What plans depend on: multiprocessors, compute capability, bytes of shared memory that a CTA can have."""
    return (multiprocessors(device), *capability(device), shared_memory(device))


def find_kernel(problem: Problem, has_key_counts: bool = False) -> Found:
    """Returns which kernel serves a problem. has_key_counts: it will be planned with `key_counts`."""
    return Found(*native.module.find_kernel(problem, gpu_of(problem.device), has_key_counts, FIXED))


def plan(
    problem: Problem, *, has_copies: bool = False, out: Tensor | None = None, constants: Constants | None = None,
    key_counts: Tensor | None = None, only_constants: bool = False,
) -> Plan:  # fmt: skip
    """Plans a problem that `find_kernel` serves, and whose recipe `gpu.scales.serves` where it has floats.

    Args:
        problem: its tensors need no copies, or are such copies.
        has_copies: they are.
        out: where the output goes; None allocates it in Q's order of axes.
        constants: those of an earlier plan of codes with the same scales, which has run.
        key_counts: how many of the keys each batch has, int32 ``[B]``; None: all of them.
        only_constants: of codes, only the launch that fills the constants; nothing else is allocated or filled in.

    Raises:
        ValueError: no kernel serves it.
    """
    problem = _normalized(problem)
    device = problem.device
    stream = 0 if device.type != "cuda" else torch._C._cuda_getCurrentRawStream(device.index)
    given = None if constants is None else (constants.score, constants.output)
    notes, kept, workspace, (score, output), made, out_scale, t_max, l = native.module.plan(
        problem, gpu_of(device), stream, out, given, key_counts, has_copies, only_constants, FIXED
    )
    kept, workspace = tuple(kept), tuple(workspace)
    others = *_tensors(problem), made, out_scale, t_max, l, key_counts, *(() if constants is None else constants.kept)
    constants = constants or Constants(score, output, kept)
    kept += tuple(x for x in others if x is not None)
    launches = tuple(launch_of(note, device, kept, workspace) for note in notes)
    return Plan(launches, constants, workspace, made, out_scale, t_max, l)


def launch_of(
    note: dict[str, Any], device: torch.device, tensors: tuple[Tensor, ...], workspace: tuple[tuple[int, int], ...] = ()
) -> CudaLaunch:
    """Returns a launch that the native module has noted. tensors, workspace: what its parameters point into."""
    maps = tuple(TensorMap(*x) for x in note.get("maps", ()))
    return CudaLaunch(
        CudaProgram.named(note["file"], note["entry"], note["macros"]), note["grid"], note["threads"],
        note["shared_bytes"], note["parameters"], device, tensors, True, maps, note.get("after_maps", b""), workspace,
    )  # fmt: skip


def _normalized(problem: Problem) -> Problem:
    """The problem with scales and ends of sequences as the native module reads them."""
    changes: dict[str, Any] = {}
    if isinstance(problem.q, QTensor):
        if problem.q.granularity == "block":
            changes["q"] = QTensor(problem.q.data, problem.q.token_scale(), "token", bits=problem.q.bits)
    elif any(isinstance(s, Tensor) and (s.device, s.dtype) != (problem.device, torch.float32)
             for s in problem.recipe.scales):  # fmt: skip
        changes["recipe"] = _on_device(problem.recipe, problem.device)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        ends = getattr(problem, name)
        if ends is not None:
            changes[name] = ends.to(problem.device, torch.int32).contiguous()
    return replace(problem, **changes) if changes else problem


def _on_device(recipe: Recipe, device: torch.device) -> Recipe:
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), recipe.scales, strict=True))
    moved = {name: s.to(device, torch.float32) for name, s in scales.items() if isinstance(s, Tensor)}
    return replace(recipe, **moved)


def _tensors(problem: Problem) -> tuple[Tensor | None, ...]:
    """The tensors that a problem's launches read."""
    found: list[Any] = [problem.bias, problem.keep, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.out_scale]
    for x in (problem.q, problem.k, problem.v):
        found += [x] if isinstance(x, Tensor) else [x.data, x.scale]
    if isinstance(problem.q, Tensor):
        found += [s for s in problem.recipe.scales if isinstance(s, Tensor)]
    return tuple(found)
