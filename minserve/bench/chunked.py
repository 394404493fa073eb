"""Chunked prefill: what a long prompt does to those who are decoding.

    whole     the prompt is computed in one step, and everybody waits for it
    chunked   each step computes at most `token_budget` tokens, one for each decoding request and the rest of the prompt

Bound    for the longest gaps (p99) of the chunked run: the time of a step that is full to its budget, measured alone
Work     8 requests decode while a long prompt arrives again and again; gaps between tokens of the 8, from the step log
Story    notebooks/07_continuous_batching.ipynb
"""

from statistics import median

from minserve.bench.common import Options, chosen, label, load, on_gpu, random_prompt
from minserve.bench.workload import PAGE
from minserve.engine import LLM
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.metrics import percentile
from minserve.request import SamplingParams
from minserve.scheduler import Scheduler, WholePrompts

DECODING = 8


def run(options: Options) -> Report:
    report = options.report()
    model = load(chosen(options)[0], options.dtype)
    long, budget, prompts = (64, 24, 1) if options.quick else (8192, 512, 6) if on_gpu() else (4096, 264, 2)
    prompt = random_prompt(model.config, long)
    case = f"{label(options.model)} {options.dtype_name}, {DECODING} decoding, prompts of {long}"
    worst = {"whole": [], "chunked": []}

    def side(who, policy, tokens):
        def once():
            seconds, made, its = interrupted(model, policy, tokens, prompt, prompts)
            worst[who].append(percentile(its, 99))
            return made / seconds

        return once

    sides = {
        "whole": side("whole", WholePrompts, long + DECODING),
        "chunked": side("chunked", Scheduler, budget),
    }
    rates = in_turn(
        sides, warmup=0, repeats=options.repeats, at_most=options.at_most, each=options.progress(case)
    )
    full = full_step(model, budget, prompt)
    better = [a / b for a, b in zip(worst["whole"], worst["chunked"])]
    note = f"bound: a step of {budget} tokens, alone"
    report.add(Row(f"{case}: p99 gap between tokens, whole", "s", worst["whole"]))
    report.add(
        Row(f"{case}: p99 gap between tokens, budget {budget}", "s", worst["chunked"], full, 0.80, note)
    )
    report.add(Row(f"{case}: p99 gap, whole / chunked", "x", better, 1.0, 5.0))
    report.add(Row(f"{case}: tokens computed, whole", "tok/s", rates["whole"]))
    report.add(Row(f"{case}: tokens computed, budget {budget}", "tok/s", rates["chunked"]))
    ratios = [b / a for a, b in zip(rates["whole"], rates["chunked"])]
    report.add(Row(f"{case}: tokens computed, chunked / whole", "x", ratios, 1.0, 0.95))
    return report


def interrupted(
    model, policy, budget: int, prompt: list[int], prompts: int
) -> tuple[float, int, list[float]]:
    """(seconds, tokens computed, the decoding requests' gaps) while `prompts` long prompts come, one after another."""
    llm = LLM(
        model, page_size=PAGE, num_pages=4 * (len(prompt) + 2 * DECODING * PAGE * 8) // PAGE, policy=policy,
        token_budget=budget, max_running=DECODING + 1, prefix_caching=False,
    )  # fmt: skip
    steady = [llm.add(prompt[i : i + 16], SamplingParams(ignore_eos=True))[0] for i in range(DECODING)]
    while any(output.request.owed > 1 for output in steady) or not all(output.tokens for output in steady):
        llm.step()
    before = llm.log[-1]  # the first gap begins with the token before the first long prompt
    llm.log.clear()
    for _ in range(prompts):
        (visitor,) = llm.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        while not visitor.finished:
            llm.step()
        for _ in range(4):
            llm.step()
    log = list(llm.log)
    llm.close()
    ids = {output.request.id for output in steady}
    ends = {i: [r.start + r.total for r in (before, *log) for row in r.rows if row.request == i] for i in ids}
    gaps = [b - a for times in ends.values() for a, b in zip(times, times[1:])]
    return sum(r.total for r in log), sum(r.num_tokens for r in log), gaps


def full_step(model, budget: int, prompt: list[int]) -> float:
    """Seconds of a step that computes its whole budget: decoding requests, and a chunk in the middle of the prompt."""
    llm = LLM(model, page_size=PAGE, token_budget=budget, max_running=DECODING + 1, prefix_caching=False)
    for i in range(DECODING):
        llm.add(prompt[i : i + 16], SamplingParams(ignore_eos=True))
    while llm.scheduler.waiting or any(r.owed > 1 for r in llm.scheduler.running):
        llm.step()
    llm.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    llm.log.clear()
    while llm.scheduler.waiting or any(r.owed > budget for r in llm.scheduler.running):
        llm.step()
    full = [record.total for record in llm.log if record.num_tokens == budget]
    llm.close()
    return median(full)
