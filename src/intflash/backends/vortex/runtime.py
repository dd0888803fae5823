"""Vortex's runtime library by ctypes, and the process that runs one job on it.

simx aborts the whole process on a kernel error, and its driver library is found by LD_LIBRARY_PATH, which is read at
process start: so a job runs in a process of its own, this file executed as a script. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path

MEM_READ, MEM_WRITE, MEM_READ_WRITE = 1, 2, 3  # VX_MEM_*: the device's view
CAPS = {"threads": 1, "warps": 2, "cores": 3, "local_memory": 6, "isa": 7}  # VX_CAPS_*

GROUP_LOCAL_BYTES = 2048  # LOCAL_LIMIT of simt.h
UNWRITTEN = 0xBAADF00DBAADF00D  # what simx's memory holds before anything is written

_U32, _U64, _HANDLE = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_POINTER = ctypes.POINTER
_SIGNATURES = {
    "vx_dev_open": [_POINTER(_HANDLE)],
    "vx_dev_close": [_HANDLE],
    "vx_dev_caps": [_HANDLE, _U32, _POINTER(_U64)],
    "vx_mem_alloc": [_HANDLE, _U64, ctypes.c_int, _POINTER(_HANDLE)],
    "vx_mem_free": [_HANDLE],
    "vx_mem_address": [_HANDLE, _POINTER(_U64)],
    "vx_copy_to_dev": [_HANDLE, ctypes.c_void_p, _U64, _U64],
    "vx_copy_from_dev": [ctypes.c_void_p, _HANDLE, _U64, _U64],
    "vx_upload_kernel_bytes": [_HANDLE, ctypes.c_void_p, _U64, _POINTER(_HANDLE)],
    "vx_upload_bytes": [_HANDLE, ctypes.c_void_p, _U64, _POINTER(_HANDLE)],
    "vx_start": [_HANDLE, _HANDLE, _HANDLE],
    "vx_ready_wait": [_HANDLE, _U64],
    "vx_mpm_query": None,  # set by the header's form
}


class DeviceError(RuntimeError):
    """A call of the runtime library failed."""


class Device:
    """An open Vortex device; a context manager.

    Args:
        library: path of libvortex.so.
        classed_counters: the tree's vx_mpm_query takes a counter class before the address (newer trees).
    """

    def __init__(self, library: str, classed_counters: bool = False) -> None:
        try:
            self._library = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise DeviceError(f"cannot load {library}: {error}") from None
        counter = [_HANDLE, *([_U32] if classed_counters else []), _U32, _U32, _POINTER(_U64)]
        self._classed = classed_counters
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise DeviceError(f"{library} has no {name}: is it Vortex's runtime of 2024 or later?") from None
            function.argtypes, function.restype = arguments or counter, ctypes.c_int
        self._device = _HANDLE()
        self._call("vx_dev_open", ctypes.byref(self._device))

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self._call("vx_dev_close", self._device)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise DeviceError(f"{name} failed with code {code}")

    def caps(self) -> dict[str, int]:
        """Threads a warp, warps a core, cores, bytes of local memory a core, flags of the instruction set."""
        value = _U64()
        found = {}
        for name, index in CAPS.items():
            self._call("vx_dev_caps", self._device, index, ctypes.byref(value))
            found[name] = value.value
        return found

    def buffer(self, size: int, flags: int, data: bytes | None = None) -> tuple[ctypes.c_void_p, int]:
        """A device buffer, filled with `data` if given: (handle, device address)."""
        handle, address = _HANDLE(), _U64()
        self._call("vx_mem_alloc", self._device, size, flags, ctypes.byref(handle))
        self._call("vx_mem_address", handle, ctypes.byref(address))
        if data is not None:
            self._call("vx_copy_to_dev", handle, data, 0, len(data))
        return handle, address.value

    def read(self, handle: ctypes.c_void_p, size: int) -> bytes:
        host = ctypes.create_string_buffer(size)
        self._call("vx_copy_from_dev", host, handle, 0, size)
        return host.raw

    def upload_kernel(self, image: bytes) -> ctypes.c_void_p:
        return self._upload("vx_upload_kernel_bytes", image)

    def run(self, kernel: ctypes.c_void_p, arguments: bytes, timeout_ms: int) -> None:
        """Starts the kernel on an argument block and waits for its end."""
        block = self._upload("vx_upload_bytes", arguments)
        self._call("vx_start", self._device, kernel, block)
        self._call("vx_ready_wait", self._device, timeout_ms)
        self._call("vx_mem_free", block)

    def counter(self, counter: tuple[int, int], core: int) -> int:
        """A performance counter (class, address) of one core."""
        value = _U64()
        arguments = counter if self._classed else counter[1:]
        self._call("vx_mpm_query", self._device, *arguments, core, ctypes.byref(value))
        return value.value

    def _upload(self, function: str, data: bytes) -> ctypes.c_void_p:
        handle = _HANDLE()
        self._call(function, self._device, data, len(data), ctypes.byref(handle))
        return handle


def check_shape(caps: dict[str, int], driver: str, threads_per_warp: int | None, group_threads: int) -> None:
    """Refuses a device whose cores cannot hold a kernel's groups, or whose warps are not those of its tensor tile.

    Raises:
        DeviceError: the message says what the device has and what the kernel needs.
    """
    # simx takes addresses of local memory modulo a quarter of its size: the number of its words, as if of its bytes
    usable = caps["local_memory"] // (4 if driver == "simx" else 1)
    has = f"the device has {caps['warps']} warps of {caps['threads']} threads a core"
    if threads_per_warp is not None and caps["threads"] != threads_per_warp:
        raise DeviceError(f"{has}; tensor-unit kernels need warps of exactly {threads_per_warp}: NUM_THREADS")
    if caps["threads"] * caps["warps"] < group_threads:
        raise DeviceError(f"{has}; the kernels need {group_threads} threads a core: NUM_WARPS times NUM_THREADS")
    warps_per_group = -(-group_threads // caps["threads"])
    if caps["warps"] % warps_per_group:
        raise DeviceError(f"{has}; the kernels need a multiple of {warps_per_group} warps: NUM_WARPS")
    groups, fit = caps["warps"] // warps_per_group, usable // GROUP_LOCAL_BYTES
    if groups > fit:
        raise DeviceError(
            f"{has}, which run {groups} groups of {group_threads} threads at once; the {usable} bytes of local memory "
            f"that a core can use hold {fit}: at most {fit * warps_per_group} warps, NUM_WARPS"
        )


def run_job(folder: Path) -> None:
    """Runs job.json of `folder` (written by device.py): buffers in, stages, counters and buffers out.

    A job without an image only asks what the device is.
    """
    job = json.loads((folder / "job.json").read_text())
    with Device(job["library"], job["classed_counters"]) as device:
        caps = device.caps()
        if "image" not in job:
            (folder / "result.json").write_text(json.dumps({"caps": caps}))
            return
        check_shape(caps, job["driver"], job["threads_per_warp"], job["group_threads"])
        buffers, addresses = {}, {}
        for name, size in job["buffers"].items():
            data = (folder / name).read_bytes()
            assert len(data) == size
            buffers[name], addresses[name] = device.buffer(size, MEM_READ_WRITE, data)
        fields = dict(job["address_fields"])
        if job["group_scratch"]:
            warps_per_group = -(-job["group_threads"] // caps["threads"])
            groups = caps["cores"] * (caps["warps"] // warps_per_group)
            _, addresses["scratch"] = device.buffer(groups * job["group_scratch"], MEM_READ_WRITE)
            fields["scratch"] = job["scratch_field"]
        kernel = device.upload_kernel(Path(job["image"]).read_bytes())
        counters = []
        for stage in job["stages"]:
            block = bytearray.fromhex(stage)
            for name, offset in fields.items():
                struct.pack_into("<Q", block, offset, addresses[name])
            device.run(kernel, bytes(block), job["timeout_ms"])
            counters.append(
                {
                    name: [device.counter(tuple(counter), core) for core in range(caps["cores"])]
                    for name, counter in job["counters"].items()
                }
            )
            if UNWRITTEN in counters[-1]["cycles"]:
                raise DeviceError(
                    "the program ended before it wrote its counters: was libvortex.a built by clang, which reads the "
                    "warp's number in one thread only? Build it with GCC, as docs/guide/vortex.md says"
                )
        for name in job["outputs"]:
            (folder / name).write_bytes(device.read(buffers[name], job["buffers"][name]))
    (folder / "result.json").write_text(json.dumps({"caps": caps, "counters": counters}))


if __name__ == "__main__":
    try:
        run_job(Path(sys.argv[1]))
    except DeviceError as error:
        sys.exit(f"vortex runtime: {error}")
