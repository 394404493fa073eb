"""Prefill and decode in two engines: what the link between them adds to the time to first token.

    transfer    from the prompt's last keys and values until all of them are on the other side
                bound = bytes / bandwidth + latency for each message, less what can be hidden behind the prompt: nothing
                of a whole transfer; of one layer by layer as much as the prompt took (lab/disaggregation.py)
    first token    the prompt and the transfer; bound = the prompt's time alone and the transfer's bound
    links       chosen so that the whole transfer takes a quarter of the prompt's time, as long, and twice as long
    copies      an unlimited link: copying pages out, through the host's memory, and in. No bound is claimed
Work        one request of 512 tokens in chunks of 256, greedy; both engines in this process, the sender a thread of it
Story       notebooks/14_the_fleet.ipynb
"""

from statistics import median

from minserve.bench.common import Options, chosen, label, load, random_prompt
from minserve.bench.workload import PAGE
from minserve.cluster.connector import MODES
from minserve.cluster.link import Link
from minserve.lab.disaggregation import Halves, HandOver
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row, quantity
from minserve.request import SamplingParams

SLOWER = (0.25, 1.0, 2.0)  # the whole transfer, in prompts' times
LATENCY = 1e-3  # seconds
ASK = SamplingParams(max_tokens=2, ignore_eos=True)


def run(options: Options) -> Report:
    report = options.report()
    model = load(chosen(options)[0], options.dtype)
    length, budget = (48, 32) if options.quick else (512, 256)
    prompt = random_prompt(model.config, length)
    case = f"{label(options.model)} {options.dtype_name}, prompt of {length}"
    shape = dict(page_size=PAGE, num_pages=2 * length // PAGE + 4, token_budget=budget)
    with Halves(model, "whole", **shape) as fast:
        free = [fast.hand_over(prompt, ASK) for _ in range(4 if options.quick else 6)][1:]
    report.add(Row(f"{case}: prefill", "s", [its.prefill for its in free]))
    size = quantity(free[0].num_bytes, "B")
    report.add(Row(f"{case}: transfer of {size}, no limit", "s", [its.transfer for its in free]))
    report.add(Row(f"{case}: first step of the decoding engine", "s", [its.decode for its in free]))
    prefill = median(its.prefill for its in free)
    for slower in SLOWER:
        seconds = slower * prefill
        link = Link(float(f"{free[0].num_bytes / seconds:.2g}"), LATENCY)
        name = f"{case}: transfer {slower:g}x the prompt"
        limited(report, options, model, prompt, name, link, shape, prefill)
    return report


def limited(
    report, options: Options, model, prompt, case: str, link: Link, shape: dict, prefill: float
) -> None:
    """Whole and layer by layer over one link, alternately. `prefill`: seconds of the prompt without a link."""
    seen: dict[str, list[HandOver]] = {mode: [] for mode in MODES}
    halves = {mode: Halves(model, mode, link, **shape) for mode in MODES}

    def side(mode):
        def once():
            seen[mode].append(halves[mode].hand_over(prompt, ASK))
            return seen[mode][-1].transfer

        return once

    sides = {mode: side(mode) for mode in MODES}
    try:
        samples = in_turn(
            sides, repeats=options.repeats, at_most=options.at_most / len(SLOWER), each=options.progress(case)
        )
    finally:
        for its in halves.values():
            its.__exit__()
    for mode, target in zip(MODES, (0.9, 0.7)):
        counted = seen[mode][-len(samples[mode]) :]
        bound = median(its.bound(mode, link) for its in counted)
        messages = counted[0].messages
        note = f"{quantity(link.bandwidth, 'B/s')}, messages: {messages}{'' if bound else '; all of it can be hidden'}"
        bounded = dict(bound=bound, target=target) if bound else {}
        report.add(Row(f"{case}, {mode}", "s", samples[mode], **bounded, note=note))
        seconds = link.predicted_seconds(counted[0].num_bytes, messages)
        least = prefill + seconds if mode == "whole" else max(prefill, seconds)
        report.add(Row(f"{case}, {mode}: first token", "s", [its.ttft for its in counted], least, target))
    ratios = [a / b for a, b in zip(samples["whole"], samples["layer"])]
    report.add(Row(f"{case}, whole / layer", "x", ratios, 1.0))
