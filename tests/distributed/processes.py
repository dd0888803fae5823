"""Runs a function on several gloo processes of this machine and gives back what each returned or raised."""

import multiprocessing
import os
import pathlib
import tempfile
import traceback
from datetime import timedelta
from typing import Any

_context = multiprocessing.get_context("forkserver")  # imports torch once, and forks before it has threads
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "intflash", "intflash.distributed", "intflash.selfcheck"]
)
GLOO_S = 60.0


def run(world: int, function: Any, *args: Any, timeout_s: float = GLOO_S, wait_s: float = 240) -> list[Any]:
    """What `function(rank, *args)` returned on each rank; an exception that it raised; None of a rank that ended."""
    os.environ["OMP_NUM_THREADS"] = "1"  # processes get it from the fork server
    with tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder) / "store"
        pipes = [_context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _context.Process(target=_work, args=(rank, world, str(store), timeout_s, pipes[rank][1], function, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        found: list[Any] = []
        for reader, _ in pipes:
            try:
                found.append(reader.recv() if reader.poll(wait_s) else TimeoutError(f"no answer in {wait_s} s"))
            except EOFError:
                found.append(None)
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        return found


def _work(rank: int, world: int, store: str, timeout_s: float, pipe: Any, function: Any, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
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
