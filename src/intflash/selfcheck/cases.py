"""A random case: every choice about one attention problem as a plain value, so that it can be written, read and shrunk.

A case is drawn from a seed and an index alone. Other files turn it into code (`source`), run it (`compare`) and
simplify it (`shrink`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from intflash.methods import METHODS
from intflash.quant.quantizers import RULES

# Our own methods have the most kernels, so that they are drawn more often than the published ones.
WEIGHTS = {"intflash": 5, "intflash_p8": 5, "intflash_online": 3}

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16")
# How a tensor lies in memory; `source.strides` defines each.
LAYOUTS = ("contiguous", "tokens_first", "columns", "fused", "padded", "every_second", "shared")
VALUES = ("normal", "outlier", "ties", "zeros", "constant", "sparse")
HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)
TOKENS = (1, 2, 16, 31, 32, 33, 49, 63, 64, 65, 77, 127, 128, 129, 196, 197, 255, 256, 257, 300)
BLOCK_SIZES = (1, 7, 16, 32, 64, 100, 128)
MASK_KINDS = ("bool", "bool", "bool", "float32", "float16", "bfloat16", "float64")
BIAS_KINDS = ("float32", "float16", "bfloat16", "int32", "int32")
OUT_SCALES = ("number", "dynamic", "tensor", "head", "batch_head", "channel")
TURNS = 4  # calls of one case, each with other values
MOST_SCORES = 200_000  # of a case: the reference takes tens of milliseconds
MOST_PRODUCTS = 20_000_000
SMALL_SCORES = 3_000  # of a small case: Triton's interpreter takes tenths of a second
SMALL_PRODUCTS = 100_000

# What makes a call wrong; `source.FAULTS` holds the code of each.
FAULTS = (
    "nan", "infinity", "mask_shape", "heads", "no_gqa", "zero_scale", "negative_scale", "out_scale_of_float",
    "zero_out_scale", "offsets", "granularity", "bias_nan", "mixed_dtypes", "two_biases", "empty", "causal_align",
)  # fmt: skip


@dataclass(frozen=True)
class MaskCase:
    """One mask or bias.

    Attributes:
        kind: its dtype.
        axes: from the last axis back, what each has: "full", "one", or "part" (a divisor of the batch).
        layout, offset: as those of q, k and v.
        absent: the share of absent keys.
        dead_rows: every third row has no key.
        amplitude: of additive values.
        lowest: an absent key has the lowest finite value instead of minus infinity.
    """

    kind: str
    axes: tuple[str, ...]
    layout: str = "contiguous"
    offset: int = 0
    absent: float = 0.2
    dead_rows: bool = False
    amplitude: float = 1.0
    lowest: bool = False


@dataclass(frozen=True)
class Case:
    """One attention problem; `values_seed` and the turn give its values.

    Attributes:
        inputs: dtype of q, k, v, or "codes".
        cache: k and v are codes beside float q, as a KV cache holds them.
        batch: the axes before the heads; None and `headless`: fewer axes than four.
        layouts, offsets: of q, k and v; an offset is in elements from the storage's start.
        granularity: of q, k and v; None takes the method's own recipe.
        static: of q, k and v: None, "number" or "tensor" for a recipe's static scale.
        packed: how many sequences `cu_seqlens` has, or None.
        fault: what is wrong with the call (`FAULTS`), or None.
        compiled, graphed: whether the call is also compiled, and captured in a CUDA graph where there is a GPU.
        threads: torch's threads on the CPU, which divide the native kernels' work.
        turns: which of the value sets are called, in order.
        moved: the last turn's tensors are contiguous, whatever the layouts are.
    """

    values_seed: int
    method: str
    inputs: str = "float32"
    cache: bool = False
    batch: tuple[int, ...] = (1,)
    headless: bool = False
    hq: int = 1
    hk: int = 1
    nq: int = 1
    nk: int = 1
    d: int = 1
    dv: int = 1
    values: str = "normal"
    amplitude: float = 1.0
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    offsets: tuple[int, int, int] = (0, 0, 0)
    granularity: tuple[str, str, str] | None = None
    bits: int = 8
    block_size: int = 128
    static: tuple[str | None, str | None, str | None] = (None, None, None)
    smooth_k: bool = False
    rotate: bool = False
    rule: str = "exact"
    scale: float | None = None
    causal: str | None = None
    window: tuple[int, int] | None = None
    mask: MaskCase | None = None
    bias: MaskCase | None = None
    packed: int | None = None
    out_dtype: str | None = None
    out_scale: str | None = None
    lse: bool = False
    gqa_flag: bool = False
    check_finite: bool | None = None
    fault: str | None = None
    compiled: bool = False
    graphed: bool = True
    threads: int = 1
    turns: tuple[int, ...] = tuple(range(TURNS))
    moved: bool = True

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before the heads, as the tensors have them."""
        return () if self.headless else self.batch

    @property
    def flat_batch(self) -> int:
        return math.prod(self.lead)

    @property
    def scores(self) -> int:
        return self.flat_batch * self.hq * self.nq * self.nk

    @property
    def products(self) -> int:
        return self.scores * max(self.d, self.dv)

    @property
    def output(self) -> str:
        return self.out_dtype or ("int8" if self.inputs == "codes" else self.inputs)

    @property
    def integer_output(self) -> bool:
        return self.output in INTEGERS

    @property
    def custom_recipe(self) -> bool:
        return self.inputs != "codes" and self.granularity is not None

    def has_codes(self, name: str) -> bool:
        """Whether this one of q, k and v is codes."""
        return self.inputs == "codes" or self.cache and name != "q"

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k and v."""
        heads = {"q": (self.hq,), "k": (self.hk,), "v": (self.hk,)}
        if self.headless:
            heads = dict.fromkeys("qkv", ())
        last = {"q": (self.nq, self.d), "k": (self.nk, self.d), "v": (self.nk, self.dv)}
        return {name: (*self.lead, *heads[name], *last[name]) for name in "qkv"}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Case:
        """The case that `as_dict`, also read from JSON, describes."""
        fixed = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
        for name in ("mask", "bias"):
            if fixed.get(name):
                fixed[name] = MaskCase(**{n: tuple(x) if isinstance(x, list) else x for n, x in fixed[name].items()})
        return cls(**fixed)


def generate(seed: int, index: int, methods: Sequence[str] | None = None, small: bool = False) -> Case:
    """The case of that index: the same on every machine.

    Args:
        seed, index: any integers.
        methods: those to draw from; None takes all.
        small: only problems that an interpreter can run, called twice.

    Example:
        >>> from intflash.selfcheck import generate
        >>> generate(0, 7) == generate(0, 7)
        True
    """
    r = random.Random(f"{seed}-{index}")
    names = sorted(methods or METHODS)
    method = r.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
    fields: dict[str, Any] = dict(values_seed=r.randrange(1 << 30), method=method)
    fields["fault"] = r.choice(FAULTS) if r.random() < 0.04 else None
    fields["inputs"] = r.choices((*FLOATS, "codes"), (4, 4, 2, 4))[0]
    fields |= _shape(r, fields["inputs"], small)
    fields |= _quantization(r, fields)
    fields["layouts"] = _three(r, LAYOUTS, 0.5, "contiguous")
    fields["offsets"] = tuple(r.choice((0, 0, 1, 2, 3, 4, 5, 8, 13, 16)) for _ in "qkv")
    if r.random() < 0.3:
        fields["scale"] = r.choice((0.01, 0.125, 0.3, 1.0) if METHODS[method].integer_only else (0.01, 0.125))
    if r.random() < 0.3:
        fields["causal"] = r.choice(("top_left", "bottom_right"))
    if r.random() < 0.2:
        fields["window"] = tuple(r.choice((-1, 0, 1, 5, 20, 64, 130, 300)) for _ in range(2))
    if r.random() < 0.4:
        fields["mask"] = _mask(r, MASK_KINDS, fields)
    if r.random() < 0.35 and (fields.get("mask") is None or fields["mask"].kind == "bool"):
        fields["bias"] = _mask(r, BIAS_KINDS, fields)
    fields |= _output(r, fields)
    fields["check_finite"] = r.choice((None, None, True, False))
    fields["gqa_flag"] = fields["hq"] != fields["hk"] or r.random() < 0.3
    fields["compiled"] = r.random() < 0.15
    fields["threads"] = r.choice((1, 1, 2, 3))
    fields |= _cache(r, fields)
    if small:
        fields["turns"] = (0, TURNS - 1)
    return Case(**fields)


def _shape(r: random.Random, inputs: str, small: bool) -> dict[str, Any]:
    """Batch, heads, tokens and head dims within the bounds of the reference's time."""
    axes = 4 if inputs == "codes" else r.choices((2, 3, 4, 5), (1, 2, 8, 1))[0]
    batch = {2: (), 3: (), 4: (r.choice((1, 1, 2, 3, 4, 6)),), 5: (r.randint(1, 3), r.randint(1, 3))}[axes]
    hk = r.choice((1, 1, 2, 3))
    hq = hk * r.choices((1, 2, 3, 4), (5, 1, 1, 1))[0]
    if axes == 2:
        hq = hk = 1
    d = r.choice(HEAD_DIMS) if r.random() < 0.6 else r.randint(1, 256)
    dv = d if r.random() < 0.75 else r.randint(1, 256)
    packed = None
    if axes in (3, 4) and r.random() < 0.12:
        packed, batch = r.randint(1, 4), (1,) * len(batch)
    nq, nk = _tokens(r), _tokens(r)
    if r.random() < 0.5:
        nk = nq
    if r.random() < 0.04:  # long rows of few queries
        nq, nk = r.randint(1, 40), r.randint(301, 2000)
    if r.random() < 0.02:  # many queries and few keys
        nq, nk = r.randint(301, 2000), r.randint(1, 40)
    most = (SMALL_SCORES, SMALL_PRODUCTS) if small else (MOST_SCORES, MOST_PRODUCTS)
    while True:
        scores = math.prod(batch) * hq * nq * nk
        if scores <= most[0] and scores * max(d, dv) <= most[1]:
            break
        if math.prod(batch) > 1:
            batch = tuple(max(n // 2, 1) for n in batch)
        elif hq > 3:
            hq = hk
        else:
            nq, nk = max(nq // 2, 1), max(nk * 2 // 3, 1)
    return dict(batch=batch, headless=axes == 2, hq=hq, hk=hk, nq=nq, nk=nk, d=d, dv=dv, packed=packed)


def _tokens(r: random.Random) -> int:
    return r.choices((r.choice(TOKENS), r.randint(1, 16), r.randint(1, 300)), (3, 1, 3))[0]


def _three(r: random.Random, choices: Sequence[str], same: float, usual: str) -> tuple[str, str, str]:
    """A choice for each of q, k and v; often one for all, often the usual one."""
    if r.random() < 0.4:
        return (usual,) * 3
    if r.random() < same:
        return (r.choice(choices),) * 3
    return tuple(r.choice(choices) for _ in "qkv")


def _quantization(r: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Values, and how they are quantized or which scales codes have."""
    method, inputs = METHODS[fields["method"]], fields["inputs"]
    # A float softmax over scores in the hundreds has no useful tolerance, so that its methods get moderate ones.
    kinds = VALUES if method.integer_only else tuple(x for x in VALUES if x != "outlier")
    found: dict[str, Any] = dict(values=r.choice((*("normal",) * 8, *kinds)))
    amplitudes = (0.01, 0.3, 1.0, 1.0, 4.0, 30.0) if method.integer_only else (0.3, 1.0, 1.0, 2.0)
    found["amplitude"] = r.choice(amplitudes)
    allowed = {name: method.granularities.get(name, ("none",)) for name in "qkv"}
    own = inputs == "codes" or r.random() < 0.5
    if not own:
        return found
    without = {"none"} if inputs == "codes" else set()
    if fields["packed"]:
        without.add("block")
    possible = {name: [x for x in kinds if x not in without] or ["tensor"] for name, kinds in allowed.items()}
    found["granularity"] = tuple(r.choice(possible[name]) for name in "qkv")
    found["block_size"] = r.choice(BLOCK_SIZES)
    found["bits"] = r.choices((8, 4), (5, 1))[0]
    if inputs != "codes":
        found["static"] = tuple(r.choice((None, None, "number", "tensor")) for _ in "qkv")
        found["smooth_k"], found["rotate"] = r.random() < 0.15, r.random() < 0.15
        found["rule"] = method.recipe.rule if r.random() < 0.8 else r.choice(RULES)
    return found


def _mask(r: random.Random, kinds: Sequence[str], fields: dict[str, Any]) -> MaskCase:
    """A mask of one of the shapes that broadcast."""
    lead = () if fields["headless"] else fields["batch"]
    most = len(lead) + (2 if fields["headless"] else 3)
    axes = [r.choice(("full", "full", "one")) for _ in range(r.randint(1, most))]
    if len(axes) == 4 == most and r.random() < 0.3:
        axes[3] = "part"
    if r.random() < 0.5 and len(axes) > 1:
        axes[0] = axes[1] = "full"
    return MaskCase(
        kind=r.choice(kinds),
        axes=tuple(axes),
        layout=r.choice(("contiguous", "contiguous", *LAYOUTS)),
        offset=r.choice((0, 0, 1, 3, 8)),
        absent=r.choice((0.0, 0.2, 0.2, 0.9, 1.0)),
        dead_rows=r.random() < 0.15,
        lowest=r.random() < 0.3,
        amplitude=r.choice((0.0, 1.0, 1.0, 8.0, 100.0) if METHODS[fields["method"]].integer_only else (0.0, 1.0, 4.0)),
    )


def _cache(r: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Codes of K and V beside float Q, where a recipe for Q and granularities of codes have been drawn."""
    kinds = fields.get("granularity")
    if fields["inputs"] == "codes" or kinds is None or "none" in kinds[1:] or len(fields["batch"]) != 1:
        return {}
    if r.random() < 0.5:
        return {}
    return dict(cache=True, static=(fields["static"][0], None, None), smooth_k=False, rotate=False)


def _output(r: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    method = METHODS[fields["method"]]
    known = [str(x).removeprefix("torch.") for x in method.out_dtypes]
    found: dict[str, Any] = dict(lse=r.random() < 0.35)
    found["out_dtype"] = r.choice(known) if r.random() < 0.6 else None
    out = found["out_dtype"] or ("int8" if fields["inputs"] == "codes" else fields["inputs"])
    if out in INTEGERS and r.random() < 0.5:
        found["out_scale"] = r.choice(OUT_SCALES)
    return found
