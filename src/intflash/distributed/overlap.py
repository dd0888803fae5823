"""Communication beside computation: a second stream of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # a collective's few blocks get in before attention's many


class Lane:
    """Work that is begun on it runs beside what the current stream does next; on a CPU at once.

    A piece of work sees all that the current stream was given before. Memory that it allocates is used again by later
    work of the lane only, which waits for the current stream too, so that no tensor is overwritten while it is read;
    what it reads the caller keeps until the work is ready.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin `work`; what is returned gives its result, for which the current stream then waits (not the host)."""
        if self.stream is None:
            result = work()
            return lambda: result
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work()
            done = self.stream.record_event()

        def ready() -> T:
            torch.cuda.current_stream().wait_event(done)
            return result

        return ready

    def hand_over(self, x: torch.Tensor) -> torch.Tensor:
        """Let the caller use a tensor of the lane on the current stream for as long as it likes."""
        if self.stream is not None:
            x.record_stream(torch.cuda.current_stream())
        return x
