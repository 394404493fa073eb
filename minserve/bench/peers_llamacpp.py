"""llama.cpp for `bench peers`: its own benchmarks, one process per turn, read as JSON.

    one sequence, prefill    llama-bench          seconds of n tokens behind a prompt, or of the prompt
    decode-heavy             llama-batched-bench  seconds of all prompts, then of all answers step by step

What they do less: tokens are random, nothing is sampled. n new tokens are a prompt and n - 1 steps, since the first
token belongs to prefill. The KV cache is in its default, f16.
Story    bench/peers.py
"""

import json
import subprocess
from pathlib import Path

import torch

from minserve.bench.common import Options
from minserve.bench.peers_here import PeerFailed, Served
from minserve.bench.workload import Work

BENCH, BATCHED = "llama-bench", "llama-batched-bench"
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "all F32"}  # as llama.cpp names a file's dtype
REMARK = "random tokens, nothing sampled, KV cache in f16"
PATIENCE = 300  # seconds


def tool(where: str, name: str) -> Path | None:
    """The program `name`: in this folder or in its bin or build/bin; or beside the program given."""
    where = Path(where)
    folder = where.parent if where.is_file() else where
    places = [folder / sub / name for sub in ("", "bin", "build/bin")]
    return next((place for place in places if place.is_file()), None)


def missing(where: str | None, model: str | None) -> str | None:
    """What is wrong with --llama-cpp and --llama-model, and what to do."""
    if not where and not model:
        return None
    if not where:
        return f"--llama-model {model} needs --llama-cpp FOLDER, where {BENCH} lies"
    if not tool(where, BENCH):
        return f"--llama-cpp {where}: no {BENCH} there, nor in bin or build/bin under it"
    if not model or not Path(model).is_file():
        return (
            f"--llama-cpp needs --llama-model FILE, the same weights as GGUF, and {model or 'none'} is no file. "
            "llama.cpp makes one:\n"
            "  python convert_hf_to_gguf.py MODEL_FOLDER --outtype bf16 --outfile FILE"
        )
    return None


class LlamaCpp:
    """Reads as a side: serve(work), for one request or for many alike."""

    name = "llama.cpp"

    def __init__(self, options: Options, num_params: int):
        """Raises PeerFailed unless the file holds as many weights of the dtype that is measured."""
        self.bench, self.batched = (tool(options.llama_cpp, name) for name in (BENCH, BATCHED))
        self.model, self.threads = options.llama_model, torch.get_num_threads()
        found = self.single(prompt=8)
        if not str(found["model_type"]).endswith(" " + TYPES[options.dtype_name]):
            raise PeerFailed(
                f"--llama-model is {found['model_type']!r}, and {options.dtype_name} is measured: not the same work"
            )
        if found["model_n_params"] != num_params:
            raise PeerFailed(
                f"--llama-model has {found['model_n_params']:,} weights, the model {num_params:,}: not the same work"
            )
        self.versions = {"llama.cpp": f"b{found['build_number']}-{found['build_commit']}"}

    def serve(self, work: Work) -> Served:
        prompt, new, count = len(work.prompts[0]), work.lengths[0], len(work.prompts)
        if count > 1:
            return self.many(prompt, new, count)
        if new == 1:
            seconds = self.single(prompt=prompt)["samples_ns"][0] / 1e9
            return Served(seconds, seconds, None)
        return Served(0.0, self.single(new=new - 1, depth=prompt)["samples_ns"][0] / 1e9, None)

    def single(self, prompt: int = 0, new: int = 0, depth: int = 0) -> dict:
        """llama-bench, once: `prompt` tokens at once, or `new` ones behind `depth`."""
        asked = {"n_prompt": prompt, "n_gen": new, "n_depth": depth}
        words = ["-r", "1", "-o", "json", "-p", prompt, "-n", new, "-d", depth]
        said = self.said(self.bench, *words)
        return answer(
            BENCH, said, asked, ("samples_ns", "model_type", "model_n_params", "build_number", "build_commit")
        )

    def many(self, prompt: int, new: int, count: int) -> Served:
        asked = {"pp": prompt, "tg": new - 1, "pl": count}
        room = count * -(-(prompt + new) // 256) * 256  # each has its own part, in multiples of 256
        words = ["-c", room, "-npp", prompt, "-ntg", new - 1, "-npl", count, "-tb", self.threads]
        said = self.said(self.batched, *words, "--output-format", "jsonl")
        found = answer(BATCHED, said, asked, ("t_pp", "t_tg"))
        return Served(found["t_pp"], found["t_pp"] + found["t_tg"], None)

    def said(self, program: Path, *words) -> str:
        command = [str(program), "-m", self.model, "-t", str(self.threads), *map(str, words)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(f"{program.name}: {error}") from None
        if done.returncode:
            raise PeerFailed(f"{program.name} ended with {done.returncode}:\n{done.stderr[-1000:]}")
        return done.stdout


def answer(name: str, said: str, asked: dict, needed: tuple[str, ...]) -> dict:
    """The one result in what a program printed: llama-bench's list of one, llama-batched-bench's line of JSON."""
    lines = [line for line in said.splitlines() if line.startswith("{")]
    try:
        (found,) = json.loads(said) if name == BENCH else map(json.loads, lines)
        got, values = {key: found[key] for key in asked}, [found[key] for key in needed]
    except (ValueError, KeyError, TypeError):
        raise PeerFailed(
            f"{name} printed {said[:200]!r}, which has not one result with {', '.join(needed)}"
        ) from None
    if got != asked or [] in values:
        raise PeerFailed(f"{name} measured {got} where {asked} was asked for: not the same work")
    return found
