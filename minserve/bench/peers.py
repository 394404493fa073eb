"""The same requests through other engines, in the same run: transformers, and vLLM where its Python is given.

    python -m minserve bench peers [--vllm-python /path/to/python]

    transformers, static        one `generate` over a padded batch; every row runs as long as the longest answer
    transformers, continuous    its own continuous batching, paged, with per-request lengths
    vLLM                        in the interpreter it is installed in; its model is loaded before the clock starts

Work     32 requests, prompts of 16-256 random ids, answers of 16-128 tokens, greedy, no end token. Sides alternate;
         every answer must have its full length, and tokens that differ from ours (in 16 bits, near-equal logits may
         change places) are counted in the row's note.
Story    README.md, Against others
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from minserve.bench.common import Options, chosen, label, load, on_gpu
from minserve.bench.opponent import twin
from minserve.bench.workload import PAGE, Work, ragged, serve, uniform
from minserve.engine import LLM
from minserve.fetch import resolve
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row

Answers = list[list[int]]


def run(options: Options) -> Report:
    report = options.report()
    model = load(chosen(options)[0], options.dtype)
    prompt, new = ((4, 12), (2, 6)) if options.quick else ((16, 256), (16, 128))
    work = ragged(model.config.vocab_size, 256 if on_gpu() else 32, prompt, uniform(*new), seed=0)
    said, other = {}, twin(model)
    sides = {
        "minserve": lambda: ours(model, work),
        "transformers, static": lambda: static(other, work),
        "transformers, continuous": lambda: continuous(other, work),
    }
    vllm = Vllm(options, work) if options.vllm_python else None
    if vllm:
        sides["vLLM"] = vllm.serve

    def timed(who, side):
        def once():
            seconds, said[who] = side()
            return work.new_tokens / seconds

        return once

    timed_sides = {who: timed(who, side) for who, side in sides.items()}
    case = f"{label(options.model)} {options.dtype_name}, {len(work.prompts)} requests"
    samples = in_turn(
        timed_sides, warmup=0, repeats=options.repeats, at_most=options.at_most, each=options.progress(case)
    )
    if vllm:
        report.versions["vllm"] = vllm.version
        vllm.close()
    for who, rates in samples.items():
        report.add(Row(f"{case}: {who}", "tok/s", rates, note=agreement(who, said, work)))
    targets = {"transformers, static": 2.7, "vLLM": 1.0} if not on_gpu() else {}
    for who, rates in list(samples.items())[1:]:
        ratios = [a / b for a, b in zip(samples["minserve"], rates)]
        report.add(Row(f"{case}: minserve / {who}", "x", ratios, 1.0, targets.get(who)))
    return report


def agreement(who: str, said: dict[str, Answers], work: Work) -> str:
    lengths = [len(answer) for answer in said[who]]
    if lengths != work.lengths:
        raise RuntimeError(
            f"{who} answered with {lengths} tokens where {work.lengths} were asked for: not the same work"
        )
    same = sum(a == b for a, b in zip(said[who], said["minserve"]))
    return "" if who == "minserve" else f"{same} of {len(lengths)} answers are ours, token for token"


def ours(model, work: Work) -> tuple[float, Answers]:
    pages = sum(-(-(len(p) + n) // PAGE) for p, n in zip(work.prompts, work.lengths))
    llm = LLM(model, page_size=PAGE, num_pages=pages, max_running=len(work.prompts), token_budget=512)
    seconds, outputs = serve(llm, work)
    return seconds, [output.tokens for output in outputs]


def static(other, work: Work) -> tuple[float, Answers]:
    """Left-padded, all rows to the longest answer; what a row made beyond its own length does not count."""
    width = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts], device=other.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=other.device)
    start = time.perf_counter()
    with torch.inference_mode():
        out = other.generate(ids, attention_mask=mask, max_new_tokens=max(work.lengths))
    answers = out[:, width:].tolist()
    return time.perf_counter() - start, [a[:n] for a, n in zip(answers, work.lengths)]


def continuous(other, work: Work) -> tuple[float, Answers]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(
        do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=max(work.lengths)
    )
    tokens = sum(map(len, work.prompts)) + work.new_tokens
    limits = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=-(-tokens // PAGE) + len(work.prompts), max_batch_tokens=512
    )
    start, answers = time.perf_counter(), {}
    with other.continuous_batching_context_manager(
        greedy, block=True, timeout=30, continuous_batching_config=limits, warmup=False
    ) as manager:
        ids = [
            manager.add_request(p, max_new_tokens=n, eos_token_id=-1)
            for p, n in zip(work.prompts, work.lengths)
        ]
        while len(answers) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError(
                    "transformers' continuous batching stopped before it had answered everything"
                )
        seconds = time.perf_counter() - start
    return seconds, [answers[i] for i in ids]


# ---------------------------------------------------------------- vLLM, in its own interpreter
VLLM = """
import json, sys, time
from pathlib import Path
import vllm
job = json.loads(sys.stdin.readline())
llm = vllm.LLM(job["model"], dtype=job["dtype"], max_model_len=job["room"], skip_tokenizer_init=True, seed=0)
params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in job["lengths"]]
prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
with open(job["answers"], "w") as out:
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        made = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(m.outputs[0].token_ids) for m in made]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out, flush=True)
"""


class Vllm:
    """vLLM in a process of its own: it reads a line, serves the work once, and writes a line."""

    def __init__(self, options: Options, work: Work):
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "answers"
        path.touch()
        model = str(resolve(options.model))
        job = dict(
            model=model, dtype=options.dtype_name, room=work.longest + 1, prompts=work.prompts, lengths=work.lengths,
            answers=str(path),
        )  # fmt: skip
        ours = {  # one process, and as many threads as we have
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self.process = subprocess.Popen(
            [options.vllm_python, "-c", VLLM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
            text=True,
            env=os.environ | ours,
        )
        self.ask(job)
        self.answers = path.open()
        self.version = self.hear()["version"]

    def serve(self) -> tuple[float, Answers]:
        self.ask("again")
        answer = self.hear()
        return answer["seconds"], answer["tokens"]

    def ask(self, what) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        """The next line it writes. Raises RuntimeError if it ends instead."""
        line = ""
        while not line.endswith("\n"):
            line += self.answers.readline()
            if not line and self.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.process.returncode}; what it said is above")
            time.sleep(0.02)
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.answers.close()
        self.folder.cleanup()
