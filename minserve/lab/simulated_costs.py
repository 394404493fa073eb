"""Where a simulation's costs of a step come from: a machine that was measured, or one that is assumed.

    recorded_costs(report)    what `bench simulator` has learned from the engine's step log and written down
    Assumed()                 a GPU by roofline, a share of each roof reached: nobody's measurement, all of it fields
    promise(costs, ...)       an SLO in multiples of what the machine takes when it does nothing else

    seconds = launch + bytes + flops - hidden * min(bytes, flops)       each at the share of its roof

Kernels hide the shorter of both behind the longer one only in part. `hidden` is the assumption that the studies hang
on: where all of it is hidden, a chunk beside decoding requests is almost free, and nothing beats chunked prefill.
Story    notebooks/14_the_fleet.ipynb
"""

from dataclasses import dataclass
from functools import cached_property

from minserve.config import SHAPES, ModelConfig
from minserve.kv_cache import bytes_per_token
from minserve.lab.report import Report
from minserve.lab.roofline import GPUS, Machine
from minserve.metrics import SLO
from minserve.simulator.costs import BETWEEN, FEATURES, PAUSES, Costs, StepCosts, Work, work

PAGE = 16
DECODING = 16  # requests, in the step of a promise
# the row of `bench simulator` whose note has the costs
FITTED = "accuracy of a step's seconds, held out, median"


def written(costs: StepCosts) -> str:
    """Costs in a line that recorded_costs reads."""
    return "µs: " + "; ".join(f"{name} = {cost * 1e6:.6g}" for name, cost in costs.named() if cost)


def recorded_costs(report: Report) -> StepCosts:
    """What a report of `bench simulator` has learned. Raises ValueError if it is of another kind."""
    notes = [row.note for row in report.rows if row.case.endswith(FITTED)]
    if not notes:
        raise ValueError(
            f"the report {report.name!r} holds no costs of a step: use one that `bench simulator` wrote"
        )
    pairs = [part.split(" = ") for part in notes[0].removeprefix("µs: ").split("; ")]
    known = {name: float(cost) / 1e6 for name, cost in pairs}
    of = lambda names: tuple(known.get(name, 0.0) for name in names)
    return StepCosts(of(FEATURES), *of([BETWEEN]), of(PAUSES))


@dataclass(frozen=True)
class Assumed:
    """A step of a large model on a GPU: bytes and flops, each at a share of its roof, and a fixed cost."""

    config: ModelConfig = SHAPES["llama-3.1-8b"]
    machine: Machine = GPUS["H100 SXM"]
    reads: float = 0.8  # of the bandwidth
    computes: float = 0.6  # of the flops
    hidden: float = 0.25  # of the shorter of both, behind the longer one
    launch: float = 1e-3  # seconds of a step that are neither
    between: float = 0.5e-3
    itemsize: int = 2

    @cached_property
    def weights(self) -> float:
        return self.config.num_params_read * self.itemsize / (self.reads * self.machine.read_bandwidth)

    @property
    def position_bytes(self) -> int:
        c = self.config
        return bytes_per_token(c.num_layers, c.num_kv_heads, c.head_dim, self.itemsize)

    @cached_property
    def position(self) -> float:  # seconds to read one's keys and values
        return self.position_bytes / (self.reads * self.machine.read_bandwidth)

    @cached_property
    def token(self) -> float:  # seconds of its matmuls
        return 2 * self.config.num_params_read / (self.computes * self.machine.flops)

    @cached_property
    def pair(self) -> float:
        c = self.config
        return 4 * c.num_layers * c.num_heads * c.head_dim / (self.computes * self.machine.flops)

    @property
    def num_pages(self) -> int:
        """Of a device whose memory holds the weights once and keys and values in nine tenths of the rest."""
        free = 0.9 * self.machine.memory - self.config.num_params * self.itemsize
        return int(free / self.position_bytes / PAGE)

    def of(self, w: Work) -> float:
        nbytes = self.weights + self.position * (w.seen + w.read)
        flops = self.token * (w.singles + w.tokens) + self.pair * (w.seen + w.pairs)
        return self.launch + nbytes + flops - self.hidden * min(nbytes, flops)

    def after(self, pause: float) -> float:
        return 0.0


def promise(costs: Costs, prompt: int, output: int, multiples: tuple[float, float]) -> SLO:
    """In multiples of what the device takes when it does nothing else."""
    first = costs.of(work([(prompt, 0)]))
    step = costs.of(work([(1, prompt + output // 2)] * DECODING)) + costs.between
    return SLO(multiples[0] * first, multiples[1] * step)
