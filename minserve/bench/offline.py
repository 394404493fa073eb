"""A few hundred requests at once, their answers wanted together: nano-vllm's workload, against the schedule's roofline.

    bound  = output tokens / the sum, over the steps the engine really took, of
             max(bytes / read bandwidth, flops / matmul rate)

A step's bytes are the weights once and each row's keys and values once; its flops are 2 per weight and token, logits
only where a token is drawn, and attention. So the bound knows which batches there were: it falls as the answers end.

Work     seed 0, 256 requests, prompts and answers of 100 to 1,024 tokens each, temperature 0.6, no end token, room for
         the longest; Qwen3-0.6B's shape. On a CPU without --model: SmolLM2, 16 requests of 8 to 64 tokens
Sources  nano-vllm's bench.py (2025): the same calls of random, so the same lengths
Story    notebooks/08_the_engine.ipynb
"""

import random
from dataclasses import replace

from minserve.bench.common import Around, Options, chosen, clean_up, label, load, on_gpu
from minserve.bench.workload import PAGE, Work
from minserve.engine import LLM, default_pages
from minserve.lab.measure import clock
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine, attention_flops, flops_per_token, kv_bytes, weight_bytes
from minserve.pages import pages_for
from minserve.request import SamplingParams

TARGET = 0.60
IDS = 10_000  # prompts are made of the first of the vocabulary


def run(options: Options) -> Report:
    report = options.report()
    name = chosen(options)[-1] if options.gpu_cases and not options.model else options.model
    count, low, high = (8, 2, 8) if options.quick else (256, 100, 1024) if on_gpu() else (16, 8, 64)
    with Around(options) as around:
        model = load(name, options.dtype)
        work = nano_vllm(count, low, high, min(IDS, model.config.vocab_size - 1))
        model.config = replace(
            model.config, context=min(model.config.context, 2 * high)
        )  # what graphs are made for
        rates, logs = zip(*serve_again(options, model, work))
        config = model.config
        del model
        clean_up()
    case = f"{label(name)} {options.dtype_name}, {count} requests, prompts and answers of {low} to {high}"
    least = [roofline_seconds(config, around.machine, log, options.dtype.itemsize) for log in logs]
    bound = work.new_tokens / min(least)
    steps = f"{work.new_tokens:,} output tokens in {len(logs[0]):,} steps"
    target = TARGET if options.gpu_cases else None
    note = options.note(steps, around.note)
    report.add(Row(f"{case}: minserve", "tok/s", list(rates), bound, target, note))
    return report


def nano_vllm(count: int, low: int, high: int, most_id: int) -> Work:
    """All prompts are drawn before all lengths, ids inclusive of the last: the order fixes what comes out."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, most_id) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return Work(prompts, [rng.randint(low, high) for _ in range(count)])


def serve_again(options: Options, model, work: Work) -> list[tuple[float, list]]:
    """(output tokens per second, step log) of as many runs as there is time for, after a short one that warms up."""
    pages = sum(pages_for(len(p) + n, PAGE) for p, n in zip(work.prompts, work.lengths))
    engine = LLM(
        model, page_size=PAGE, num_pages=min(pages, default_pages(model, PAGE)), token_budget=16_384,
        max_running=len(work.prompts), prefix_caching=False, log_length=1_000_000,
    )  # fmt: skip
    runs = []

    def once(some: Work) -> float:
        params = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True) for n in some.lengths]
        engine.log.clear()
        outputs = []
        seconds = clock(lambda: outputs.extend(engine.generate(some.prompts, params, progress=False)))
        short = next((out for (out,), n in zip(outputs, some.lengths) if len(out.tokens) != n), None)
        if short is not None:
            raise RuntimeError(
                f"an answer of {len(short.tokens)} tokens is too short: not the work"
            ) from short.error
        runs.append((some.new_tokens / seconds, list(engine.log)))
        return seconds

    once(
        Work(work.prompts, [2] * len(work.prompts))
    )  # compiles, and every size of batch is captured on the way
    runs.clear()
    first = once(work)
    more = 2 if options.quick else min(4, int(options.at_most / first))
    for _ in range(more):
        once(work)
    engine.close()
    return runs


def roofline_seconds(config, machine: Machine, log: list, itemsize: int) -> float:
    """The least seconds in which a machine can do the steps of this log, one after another."""
    head = 2 * config.vocab_size * config.hidden_size
    weights, total = weight_bytes(config, itemsize), 0.0
    for record in log:
        nbytes, flops = weights, 0
        for row in record.rows:
            nbytes += kv_bytes(config, row.computed + row.num_tokens, itemsize)
            middle = row.computed + (row.num_tokens + 1) // 2  # keys the row's queries see, on average
            flops += row.num_tokens * (flops_per_token(config) + attention_flops(config, middle))
            flops -= (row.num_tokens - row.sampled * (1 + row.drafted)) * head
        total += machine.seconds(nbytes, flops)
    return total
