"""Calls of the native CPU backend: threads, failures on the way, what is refused."""

import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from cpu_problems import ISAS, METHODS, assert_same_bits

import intflash
from intflash.backends import cpu, reference
from intflash.call import prepare
from oracle import randn

pytestmark = pytest.mark.skipif(not ISAS, reason="the native module was not built")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("shape", [(6, 7, 131, 48), (1, 3, 250, 64), (1, 5, 400, 64)], ids=str)
def test_thread_counts_do_not_change_bits(method, shape, threads):
    """Heads whole to a thread and heads cut between threads, which then take them up in the middle."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    problem = prepare(q, k, v, method=method)[0]
    expected = cpu.run(problem, threads=1)
    for _ in range(4):  # threads draw from one another as it happens
        assert_same_bits(cpu.run(problem, threads=threads), expected)


@pytest.mark.parametrize("out_dtype, failing", [(torch.int8, 1), (torch.int8, 2), (torch.float32, 1)])
def test_outputs_that_cannot_be_made(out_dtype, failing):
    """The caller's error (of codes or of their scale), though workers have begun by then; the next call is right."""
    q = torch.randn(1, 12, 197, 64)
    problem = prepare(q, q, q, out_dtype=out_dtype, out_scale="bound" if out_dtype == torch.int8 else None)[0]
    expected = cpu.run(problem, threads=1)
    made = []

    def empty_strided(*shape, **kind):
        made.append(shape)
        if len(made) == failing:
            raise MemoryError("none left")
        return torch.empty_strided(*shape, **kind)

    problem = problem if out_dtype.is_floating_point else problem.quantized()
    for threads in (1, 2, 4):
        made.clear()
        cpu._native.use_torch(empty_strided, tuple(cpu.OUT_TYPES), torch.int32, torch.int64, False)
        try:
            with pytest.raises(MemoryError, match="none left"):
                cpu.run(problem, threads=threads)
        finally:
            cpu.use_native(cpu._native)
        assert len(made) == failing
        assert_same_bits(cpu.run(problem, threads=threads), expected)


def test_short_calls_beside_sleeping_workers():
    """Far apart the caller does them alone; close together they wake the workers."""
    q = torch.randn(1, 12, 98, 32)
    problem = prepare(q, q, q, method="intflash_p8")[0]
    expected = cpu.run(problem, threads=1)
    for pause in (0.01, 0.01, 0, 0, 0, 0.01, 0):
        time.sleep(pause)
        for _ in range(20 if pause == 0 else 1):
            assert_same_bits(cpu.run(problem, threads=3), expected)


def test_calls_from_several_threads_at_once():
    problems = [prepare(*(torch.randn(4, 8, n, 32) for _ in range(3)))[0] for n in (90, 97, 113, 130)]
    expected = [cpu.run(p, threads=1).out for p in problems]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(cpu.run(problems[i], threads=2).out, expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_calls_of_one_head_after_one_another():
    for seed in range(3):
        problem = prepare(*randn(1, 1, 40, 16, seed=seed))[0]
        expected = reference.BACKEND.run(problem)
        for isa in ISAS:
            assert_same_bits(cpu.run(problem, isa=isa, threads=1), expected)


def test_a_forked_child_computes():
    code = """
import os, torch
from intflash.backends import cpu
from intflash.call import prepare
q = torch.randn(4, 8, 100, 32)
problem = prepare(q, q, q)[0]
a = cpu.run(problem, threads=2).out
pid = os.fork()
if pid == 0:  # without torch's own threads, which do not survive a fork
    os._exit(0 if cpu.run(problem, threads=2).out.numpy().tobytes() == a.numpy().tobytes() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


INTERRUPTED = """
import signal, threading, time, os, torch
from intflash.backends import cpu
from intflash.call import prepare

q = torch.randn(1, 4, 16384, 64)
long, short = (prepare(x, x, x, method="intflash_p8")[0] for x in (q, q[:, :, :300].contiguous()))
expected = cpu.run(short, isa="generic", threads=1).out
sent = 0.0

def interrupt():
    global sent
    time.sleep(0.3)
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

def again(number, frame):
    try:
        cpu.run(short, threads=1)
    except RuntimeError as error:
        refused.append(str(error))
    raise TimeoutError("told to stop")

refused = []
for problem in (long, long.quantized()):
    for threads in (1, 2):
        for handler, error in ((signal.default_int_handler, KeyboardInterrupt), (again, TimeoutError)):
            signal.signal(signal.SIGINT, handler)
            sender = threading.Thread(target=interrupt)
            sender.start()
            try:
                cpu.run(problem, isa="generic", threads=threads)
            except error:
                waited = time.monotonic() - sent
            sender.join()
            print(f"{waited:.3f} s")
            assert waited < 1.0, waited
            del waited
            assert torch.equal(cpu.run(short, isa="generic", threads=threads).out, expected)
assert len(refused) == 4 and all("signal handler" in message for message in refused), refused
"""


def test_ctrl_c_ends_a_long_call():
    """A fraction of a second ends what takes ten; the next call is right; a handler cannot begin another one."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("shape, keys", [((1, 2, 9000, 16), 9000), ((1, 72, 1024, 64), 4096)], ids=str)
def test_long_calls_have_the_bits_of_their_heads(shape, keys):
    """A long call is divided into ranges of some milliseconds, a call of a part of its rows is not."""
    isa = ISAS[0]
    q, (k, v) = randn(*shape)[0], randn(*shape[:2], keys, shape[3])[:2]
    problem = prepare(q, k, v, method="intflash_p8")[0].quantized()
    whole = cpu.run(problem, isa=isa, threads=3).out
    assert torch.equal(cpu.run(problem, isa=isa, threads=1).out, whole)
    for head in (0, shape[1] - 1):
        for first in (0, shape[2] - 100):
            tokens = slice(first, first + 100), slice(None), slice(None)
            rows, *other = (
                intflash.QTensor(x.data[:, head : head + 1, n].contiguous(), x.scale[:, head : head + 1], "head")
                for x, n in zip((problem.q, problem.k, problem.v), tokens, strict=True)
            )
            part = prepare(rows, *other, method="intflash_p8", scale=problem.sm_scale, out_dtype=whole.dtype)[0]
            assert torch.equal(cpu.run(part, isa=isa, threads=1).out, whole[:, head : head + 1, first : first + 100])


SHORT_OF = """
import os, resource, sys, torch
from intflash import QTensor
from intflash.backends import cpu
from intflash.call import prepare
torch.set_num_threads(1)

def problem(keys, head_dim):
    codes = [torch.randint(-127, 128, (1, 4, n, head_dim), dtype=torch.int8) for n in (64, keys, keys)]
    return prepare(*(QTensor(x, 0.01) for x in codes), method="intflash_p8", out_dtype=torch.int8, out_scale="bound")[0]

small, large = problem(256, 64), problem(65536, 256)
expected = cpu.run(small, threads=1).out
resource_of = getattr(resource, sys.argv[1])
if sys.argv[1] == "RLIMIT_AS":
    cpu.run(small, threads=2)  # the worker is there
    failed = 0
    for room in range(10, 200, 10):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource_of, (used + (room << 20), resource.RLIM_INFINITY))
        try:
            cpu.run(large, threads=2)
        except MemoryError:
            failed += 1
        resource.setrlimit(resource_of, (resource.RLIM_INFINITY,) * 2)
        assert torch.equal(cpu.run(small, threads=2).out, expected)
    assert failed
else:
    if os.geteuid() == 0:
        os.setuid(65534)  # a limit of processes is none for root
    resource.setrlimit(resource_of, (1, 1))
    for _ in range(3):
        assert torch.equal(cpu.run(small, threads=4).out, expected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_NPROC"])
def test_short_of_memory_or_threads(limit):
    """MemoryError, whichever thread it hits, and the next call is right; threads that cannot start are done without."""
    done = subprocess.run([sys.executable, "-c", SHORT_OF, limit], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_it_is_the_default_on_a_cpu():
    q = torch.randn(1, 2, 20, 16)
    a, b = (intflash.attention(q, q, q, backend=name) for name in (None, "cpu"))
    assert torch.equal(a, b)
    assert intflash.info()["backends"]["cpu"]["available"] is None


def test_an_unknown_instruction_set_is_refused():
    problem = prepare(*(torch.randn(1, 1, 4, 4) for _ in range(3)))[0]
    with pytest.raises(ValueError, match="instruction set"):
        cpu.run(problem, isa="sse")


@pytest.mark.parametrize("method", cpu.FLASH)
@pytest.mark.parametrize("scale", [30.0, 1e-6])
def test_flash_score_units_past_int32_are_refused(method, scale):
    codes = torch.ones(1, 1, 4, 4, dtype=torch.int8)
    tensors = [intflash.QTensor(codes, s) for s in (scale, scale, 1.0)]
    with pytest.raises(intflash.InputError, match="int32|2\\^31"):
        cpu.run(prepare(*tensors, method=method, out_dtype=torch.int8, out_scale="bound")[0])


def test_reasons():
    def reason(**options):
        return cpu.BACKEND.unsupported(prepare(*(torch.randn(1, 1, 4, 4) for _ in range(3)), **options)[0])

    assert reason() is None
    assert "log-sum-exp" in reason(method="qflash", return_lse=True)
    assert "no kernel of this method" in reason(method="fp32")
    x = torch.randn(1, 1, 4, 257)
    assert cpu.BACKEND.unsupported(prepare(x[..., :4], x[..., :4], x[..., :256])[0]) is None
    assert "to 256, got 257" in cpu.BACKEND.unsupported(prepare(x[..., :4], x[..., :4], x)[0])


def test_unsupported_shapes_go_to_another_backend():
    q, v = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 300)
    for method, lse in itertools.product(("intflash", "intflash_p8"), (False, True)):
        intflash.attention(q, q, v, method=method, return_lse=lse)
