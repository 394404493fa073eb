"""What every benchmark needs: its options, models, greedy rates, and ceilings measured before and after."""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from minserve import fetch, weights
from minserve.config import SHAPES, ModelConfig
from minserve.lab.measure import clock
from minserve.lab.report import Report, quantity
from minserve.lab.roofline import Ceilings, Machine, ceilings, name_of
from minserve.model import Model

GPU_SHAPES = ["llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b"]
TINY = {  # the same families, a thousandth of the size: what `--tiny` runs in their place
    f"tiny-{name}": replace(
        SHAPES[name], vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, context=2048, windows=(),
    )
    for name in GPU_SHAPES
}  # fmt: skip


LEFT_OUT = "left out, for no time was left: "


@dataclass(frozen=True)
class Options:
    name: str
    command: str  # as it would be typed again
    model: str | None  # None: what the benchmark chooses for this machine
    dtype: torch.dtype
    quick: bool
    vllm_python: str | None = None  # only `bench peers`, like the next two
    llama_cpp: str | None = None
    llama_model: str | None = None
    quant: str | None = None  # only `bench decode`: int8 or int4 weights
    drafters: tuple[str, ...] = ()  # only `bench spec`, like the next two: who drafts ...
    k: int | None = None  # ... how many tokens; None: as many as each likes
    batches: tuple[int, ...] = ()  # requests at once
    tiny: bool = False  # a GPU's cases, made small enough for any machine
    seconds: float | None = None  # what there is for all of it, from `started` on; None: as long as it takes
    started: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)  # cases for which no time was left

    @classmethod
    def of(cls, args, name: str, command: str) -> "Options":
        words = ["python -m minserve", command]
        words += [f"--model {label(args.model)}"] if args.model else []
        words += [f"--dtype {args.dtype}"] if args.dtype else []
        tiny, seconds = getattr(args, "tiny", False), getattr(args, "seconds", None)
        words += ["--tiny"] if tiny else ["--quick"] if args.quick else []
        words += [f"--seconds {seconds:g}"] if seconds else []
        quant = getattr(args, "quant", None)
        words += [f"--quant {quant}"] if quant else []
        others = {key: getattr(args, key, None) for key in ("vllm_python", "llama_cpp", "llama_model")}
        for key, what in zip(others, ("PYTHON", "FOLDER", "FILE.gguf")):  # where it lies is nobody's business
            words += [f"--{key.replace('_', '-')} {what}"] if others[key] else []
        dtype = weights.DTYPES[args.dtype] if args.dtype else usual_dtype()
        drafters, k, batches = (getattr(args, key, None) for key in ("drafter", "k", "batch"))
        words += [f"--drafter {' '.join(drafters)}"] if drafters else []
        words += [f"--k {k}"] if k else []
        words += [f"--batch {' '.join(map(str, batches))}"] if batches else []
        spec = dict(drafters=tuple(drafters or ()), k=k, batches=tuple(batches or ()))
        quick, command = args.quick or tiny, " ".join(words)
        return cls(
            name, command, args.model, dtype, quick, **others, **spec, quant=quant, tiny=tiny, seconds=seconds
        )

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    @property
    def repeats(self) -> int:
        return 3 if self.quick else 20

    @property
    def at_most(self) -> float:
        """Seconds of repeating: a benchmark under 90 s on 2 cores; what is left, where the time was given."""
        usual = 5 if self.quick else 25 if on_gpu() else 45
        return usual if self.seconds is None else min(usual, max(0.5, self.left))

    @property
    def left(self) -> float:
        return math.inf if self.seconds is None else self.started + self.seconds - time.monotonic()

    @property
    def gpu_cases(self) -> bool:
        return self.tiny or on_gpu()

    def shares(self, cases: Iterable, least: int = 1):
        """(case, options for it): each gets its share of the time left, the first `least` in any case.

        When the time is over, the rest is left out, and named in `left_out`: the most telling cases come first.
        """
        cases = list(cases)
        for i, case in enumerate(cases):
            if i >= least and self.left <= 0:
                self.left_out.extend(map(str, cases[i:]))
                return
            share = None if self.seconds is None else self.left / (len(cases) - i)
            yield case, replace(self, seconds=share, started=time.monotonic())

    def note(self, *notes: str) -> str:
        """One note out of several, some of them empty; and which cases found no time."""
        missing = f"{LEFT_OUT}{', '.join(self.left_out)}" if self.left_out else ""
        return "; ".join(filter(None, [*notes, missing]))

    def report(self) -> Report:
        return Report(self.name, self.command)

    def progress(self, what: str):
        """Something to look at while a measurement runs, on a terminal only."""
        return Progress(f"{self.name}: {what}")


def add_model_arguments(parser) -> None:
    shapes = ", ".join(SHAPES)
    parser.add_argument("--model", help=f"folder, hub id, or random weights in a real shape: {shapes}")
    parser.add_argument(
        "--dtype", choices=list(weights.DTYPES), help="default: bfloat16 where the device has it"
    )
    parser.add_argument("--quick", action="store_true", help="prove that it runs; the numbers mean nothing")
    parser.add_argument(
        "--tiny", action="store_true", help="--quick, and a GPU's cases in a size for any machine"
    )
    parser.add_argument("--seconds", type=float, help="time for all of it: fewer repeats, then fewer cases")


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def usual_dtype() -> torch.dtype:
    """bfloat16, except on GPUs before Ampere, which only have fp16 tensor cores."""
    old = on_gpu() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if old else torch.bfloat16


# ---------------------------------------------------------------- models
def chosen(options: Options) -> list[str | None]:
    """The models to measure: the one asked for; else SmolLM2, and on a GPU the real shapes that fit."""
    if options.model:
        return [options.model]
    if options.tiny:
        return list(TINY)
    if not on_gpu():
        return [None]
    here = [] if fetch.faults(fetch.default_folder()) else [None]
    return [name for name in GPU_SHAPES if fits(SHAPES[name], options.dtype)] + here


def fits(config: ModelConfig, dtype: torch.dtype, copies: int = 1) -> bool:
    """Weights in at most three quarters of what is free: the rest is for caches and activations."""
    free, _ = torch.cuda.mem_get_info()
    return copies * config.num_params * dtype.itemsize < 0.75 * free


def load(name: str | None, dtype: torch.dtype) -> Model:
    if shape := (SHAPES | TINY).get(name):
        return Model.random(shape, dtype, device())
    try:
        return weights.load(fetch.resolve(name), dtype, device())
    except (fetch.FetchError, OSError, ValueError) as error:  # its text says what is wrong and what to do
        raise SystemExit(f"bench: {error}") from None


def label(name: str | None) -> str:
    """A model's name in a row: the last part of a path, so that no machine's folders end up in a report."""
    return (name or fetch.DEFAULT_MODEL).rstrip("/").split("/")[-1]


def attention_heads(options: Options) -> tuple[int, int, int]:
    """Query heads, key/value heads, channels: Llama-3.1-8B's on a GPU, SmolLM2's on a CPU."""
    return (4, 2, 16) if options.tiny else (32, 8, 128) if on_gpu() else (9, 3, 64)


def random_prompt(config: ModelConfig, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (tokens,), generator=generator).tolist()


def affordable(two: Callable[[], object], seconds: float, least: int, most: int) -> int:
    """How many tokens fit in `seconds`, from the time `two` takes to make two: a busy machine does less work."""
    return max(least, min(most, int(seconds * 2 / clock(two))))


def clean_up() -> None:
    """Give the last model's memory back before the next one is built."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- denominators
def settle(before: Ceilings, after: Ceilings, dtype: torch.dtype) -> tuple[Machine, str]:
    """The machine as it was at its best around a measurement, and a note if it did not hold still.

    10 % on a CPU, whose neighbours come and go, 3 % on a GPU, is what may pass in silence.
    """
    first, last = before.machine(dtype), after.machine(dtype)
    best = Machine(first.name, max(first.read_bandwidth, last.read_bandwidth), max(first.flops, last.flops))
    notes = []
    for what, unit, a, b in [
        ("read bandwidth", "B/s", first.read_bandwidth, last.read_bandwidth),
        ("matmul rate", "FLOP/s", first.flops, last.flops),
    ]:
        if abs(a - b) > (0.03 if on_gpu() else 0.10) * max(a, b):
            notes.append(f"{what} moved: {quantity(a, unit)} before, {quantity(b, unit)} after")
    return best, "; ".join(notes)


class Around:
    """Measures the ceilings on entering and on leaving; `.machine` and `.note` are there afterwards."""

    def __init__(self, options: Options):
        self.options = options

    def measure(self) -> Ceilings:
        return ceilings((self.options.dtype,), self.options.quick)

    def __enter__(self):
        self.before = self.measure()
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.machine, self.note = settle(self.before, self.measure(), self.options.dtype)


class Progress:
    """One line on a terminal that counts rounds and disappears; nothing when the output is not a terminal."""

    def __init__(self, what: str):
        self.what, self.shown, self.start = what, sys.stderr.isatty(), time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if self.shown:
            end = "\r" + " " * 100 + "\r" if done == of else ""
            print(f"\r{self.what}: {done} of at most {of}{end}", end="", file=sys.stderr, flush=True)
