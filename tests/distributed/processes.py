"""Runs a function on several processes of this machine and gives back what each returned or raised."""

import importlib
import multiprocessing
import os
import pathlib
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# A clean process imports what the ranks need, and forks them before it has any thread.
_clean = multiprocessing.get_context("forkserver")
_clean.set_forkserver_preload(["torch", "torch.distributed", "intflash", "intflash.distributed"])
_fork = multiprocessing.get_context("fork")


def run(
    world: int, function: str, *args: Any, backend: str = "gloo", timeout_s: float = 60, wait_s: float = 240
) -> list[Any]:
    """What `function` ("module:name"), called with the rank and args, returned on each rank; the exception that it
    raised; None of a rank that was killed. timeout_s: of the process group; wait_s: for all answers."""
    os.environ["OMP_NUM_THREADS"] = "1"  # processes get it from the fork server
    reader, writer = _clean.Pipe(duplex=False)
    leader = _clean.Process(target=_lead, args=(writer, world, function, args, backend, timeout_s, wait_s))
    leader.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(wait_s + 30) else [TimeoutError("no answer")] * world
    finally:
        leader.join(5)
        if leader.is_alive():
            leader.kill()


def _lead(
    to: Connection, world: int, function: str, args: tuple, backend: str, timeout_s: float, wait_s: float
) -> None:
    module, _, name = function.partition(":")
    function = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:
        store, pipes, ranks = pathlib.Path(folder) / "store", [], []
        for rank in range(world):
            reader, writer = _fork.Pipe(duplex=False)
            work = rank, world, backend, str(store), timeout_s, writer, function, args
            ranks.append(_fork.Process(target=_work, args=work))
            ranks[-1].start()
            writer.close()
            pipes.append(reader)
        found: list[Any] = []
        for reader in pipes:
            try:
                found.append(reader.recv() if reader.poll(wait_s) else TimeoutError(f"no answer in {wait_s} s"))
            except EOFError:
                found.append(None)
        for process in ranks:
            process.join(10)
            process.kill()
    to.send(found)


def _work(
    rank: int, world: int, backend: str, store: str, timeout_s: float, pipe: Connection, function: Any, args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast, which a shared host may not have
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )
    try:
        answer = function(rank, *args)
    except Exception as error:
        answer = error
        traceback.print_exc()
    pipe.send(answer)
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        pass  # another rank has ended


def answers(found: list[Any]) -> list[Any]:
    """The answers of ranks that all succeeded."""
    for x in found:
        if isinstance(x, Exception):
            raise x
    return found
