"""Prefix caching: what a hit saves, and what looking for one costs when there is none.

    hit     a prompt whose first 2,048 tokens are cached: time to first token against that of its tail alone
            bound = time to first token of a prompt that is only the tail: nothing less can be computed
    miss    prompts that share nothing: output tokens per second with the index on and off; bound 1, no cost
Work     greedy, tails of 32 tokens; for the misses, 16 prompts of 128 tokens with 16 new ones each
Story    notebooks/06_prefix_caching.ipynb
"""

import time
from statistics import median

from minserve.bench.common import Options, chosen, label, load, on_gpu, random_prompt
from minserve.bench.workload import PAGE, ragged, rate, uniform
from minserve.engine import LLM
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.request import SamplingParams

TAIL = 32


def run(options: Options) -> Report:
    report = options.report()
    model = load(chosen(options)[0], options.dtype)
    shared = 64 if options.quick else 2048
    case = f"{label(options.model)} {options.dtype_name}"
    hit(report, options, model, f"{case}, {shared} + {TAIL} tokens", shared)
    miss(report, options, model, f"{case}, nothing shared")
    return report


def hit(report: Report, options: Options, model, case: str, shared: int) -> None:
    prompt = random_prompt(model.config, shared + 1000 * TAIL)
    llm, starts = LLM(model, page_size=PAGE, token_budget=4096), iter(range(shared, len(prompt), TAIL))

    def tail():
        at = next(starts)  # a new one each time
        return prompt[at : at + TAIL]

    first_token(llm, prompt[:shared] + tail())  # now the index knows the shared part

    def salted():  # a salt nobody else has: no hit
        return first_token(llm, prompt[:shared] + tail(), salt=str(time.time_ns()).encode())

    sides = {
        "no hit": salted,
        "hit": lambda: first_token(llm, prompt[:shared] + tail()),
        "the tail alone": lambda: first_token(llm, tail()),
    }
    samples = in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=options.progress("hits"))
    share = llm.scheduler.hit_tokens / llm.scheduler.asked_tokens
    bound = median(samples["the tail alone"])
    report.add(Row(f"{case}: first token, no hit", "s", samples["no hit"]))
    note = f"{share:.0%} of all prompt tokens of this run came from the cache"
    report.add(Row(f"{case}: first token, hit", "s", samples["hit"], bound, 0.80, note))
    report.add(Row(f"{case}: no hit / hit", "x", [a / b for a, b in zip(samples["no hit"], samples["hit"])]))


def first_token(llm: LLM, prompt: list[int], salt: bytes = b"") -> float:
    start = time.perf_counter()
    llm.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True), salt=salt)
    while llm.outputs:
        llm.step()
    return time.perf_counter() - start


def miss(report: Report, options: Options, model, case: str) -> None:
    count, length = (4, 32) if options.quick else (64, 512) if on_gpu() else (16, 128)
    work = ragged(model.config.vocab_size, count, (length, length), uniform(16, 16), seed=5)
    sides = {
        name: lambda on=on: rate(model, work, prefix_caching=on)
        for name, on in (("index off", False), ("index on", True))
    }
    samples = in_turn(
        sides, repeats=options.repeats, at_most=options.at_most, each=options.progress("misses")
    )
    for who, rates in samples.items():
        report.add(Row(f"{case}: {who}", "tok/s", rates))
    ratios = [on / off for off, on in zip(*samples.values())]
    report.add(Row(f"{case}: on / off", "x", ratios, 1.0, 0.99))
