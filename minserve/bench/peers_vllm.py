"""vLLM for `bench peers`: one process of the interpreter it is installed in serves every case.

    ours   one JSON line on its stdin: the model once, then prompts and lengths, as often as asked
    its    one JSON line per line in a file, since it prints freely: version, then {first, seconds, tokens}

Its own defaults, but: the model is loaded in the process that answers, and it gets our number of threads.
Story    bench/peers.py
"""

import inspect
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from minserve.bench.common import Options, label
from minserve.bench.peers_here import PeerFailed, Served
from minserve.bench.workload import Work
from minserve.config import SHAPES
from minserve.fetch import resolve

PATIENCE, FAREWELL = 300, 30  # seconds to load or to answer; to end


def loop():
    """What runs over there: only this function's text is sent, so it imports all it needs."""
    import json
    import sys
    import time

    import vllm
    from vllm.sampling_params import RequestOutputKind

    job = json.loads(sys.stdin.readline())
    llm = vllm.LLM(
        job["model"], dtype=job["dtype"], max_model_len=job["room"], skip_tokenizer_init=True, seed=0
    )
    engine, names = llm.llm_engine, iter(range(10**9))
    with open(job["answers"], "w") as out:
        print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
        for line in sys.stdin:
            work, first, made = json.loads(line), None, {}
            # a single answer is followed token by token; many are wanted when they are done, as LLM.generate does
            kind = RequestOutputKind.CUMULATIVE if len(work["lengths"]) == 1 else RequestOutputKind.FINAL_ONLY
            ids = [str(next(names)) for _ in work["lengths"]]
            start = time.perf_counter()
            for name, prompt, n in zip(ids, work["prompts"], work["lengths"]):
                params = vllm.SamplingParams(
                    temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, output_kind=kind
                )
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                for answer in engine.step():
                    made[answer.request_id] = answer.outputs[0].token_ids
                    first = first or time.perf_counter() - start
            seconds = time.perf_counter() - start
            tokens = [list(made[name]) for name in ids]
            print(json.dumps({"first": first, "seconds": seconds, "tokens": tokens}), file=out, flush=True)


class Vllm:
    """Reads as a side: serve(work). close() ends the process."""

    name = "vLLM"

    def __init__(self, options: Options, room: int):
        """room: tokens of the longest sequence, prompt and answer. Raises PeerFailed if it does not start."""
        if options.model in SHAPES:
            raise PeerFailed(
                f"{label(options.model)} has random weights and no folder, so vLLM cannot load it: --model FOLDER"
            )
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "answers"
        path.touch()
        self.answers = path.open()
        self.process = subprocess.Popen(
            [options.vllm_python, "-c", f"{inspect.getsource(loop)}\nloop()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=surroundings(torch.get_num_threads()),
        )
        model = str(resolve(options.model))
        try:
            self.ask(dict(model=model, dtype=options.dtype_name, room=room, answers=str(path)))
            self.versions = {"vllm": str(self.hear("version"))}
        except BaseException:
            self.close()
            raise

    def serve(self, work: Work) -> Served:
        self.ask(dict(prompts=work.prompts, lengths=work.lengths))
        return Served(*self.hear("first", "seconds", "tokens"))

    def ask(self, what: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended; hear() says how
            pass

    def hear(self, *names: str):
        """These values of the next line it writes. Raises PeerFailed if it ends, is silent or says something else."""
        line, deadline = "", time.monotonic() + PATIENCE
        while not line.endswith("\n"):
            ended = self.process.poll() is not None  # before reading: what it wrote last is still an answer
            line += self.answers.readline()
            if not line.endswith("\n"):
                if ended:
                    raise PeerFailed(
                        f"vLLM ended with {self.process.returncode} and no answer; what it said is above"
                    )
                if time.monotonic() > deadline:
                    raise PeerFailed(f"vLLM has not answered for {PATIENCE} s")
                time.sleep(0.02)
        try:
            found = json.loads(line)
            values = [found[name] for name in names]
        except (ValueError, KeyError, TypeError):
            raise PeerFailed(
                f"vLLM's process wrote {line[:80]!r} where {', '.join(names)} were due"
            ) from None
        return values if len(values) > 1 else values[0]

    def close(self) -> None:
        try:
            self.process.stdin.close()
        except OSError:  # it ended with a line of ours unread
            pass
        try:
            self.process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()
        self.folder.cleanup()


def surroundings(threads: int) -> dict[str, str]:
    """Whoever measures may set VLLM_... otherwise; the threads are as many as ours."""
    usual = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return usual | os.environ | {"OMP_NUM_THREADS": str(threads)}
