"""The engine: requests in, text out, many at a time. One loop turns, and each turn is five lines.

    plan   = scheduler.schedule()                  who, and how many tokens
    batch  = packer.pack(plan)                     lists become tensors
    logits = compute(batch)                        the only line that computes: plain, fused, or replayed
    tokens = sampler(logits, batch)                one per row whose debt is paid
    done   = scheduler.commit(plan, tokens)        debts down, tokens out, pages back

The last line has two halves. advance() needs no token: debts down, and a place kept for the token that is being
made. settle() fills the place, ends who is done, and gives pages back. With `overlap` the next step is scheduled and
sent off between the two, so a GPU goes from step to step without waiting for Python. What it costs: whoever stops at
an end token or a stop string has one more token computed, which nobody sees.

    Engine     add(), step(), abort(), close(): the loop's body, without a loop
    LLM        generate(prompts): runs it until everything is answered, with a progress bar
    Output     one completion as its reader sees it: text that only ever grows, and how it ended

Nothing is lost    Bad input is refused by add(), before anything else knows of it. If a step fails, its requests are
                   run one by one: the one that cannot be computed ends with its own error, the others go on. Every
                   output ends exactly once: "stop", "length", "abort", "timeout" or "error".
Story              notebooks/08_the_engine.ipynb
"""

import itertools
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from tqdm import tqdm

from minserve.batch import Batch, Packer, ToHost
from minserve.drafters import drafter_for
from minserve.fetch import resolve
from minserve.graphs import Fused, Graphs
from minserve.kv_cache import bytes_per_token
from minserve.model import Model
from minserve.output import Output
from minserve.pages import PagePool, pages_for
from minserve.prefill_decode import tokens_to_make
from minserve.quantized_cache import cache_for, page_for
from minserve.request import UNKNOWN, Request, SamplingParams, Status, check_vocabulary, seed_of
from minserve.sampler import Sampler
from minserve.scheduler import Plan, QueueFull, Scheduler
from minserve.speculation import Drafter, Speculation
from minserve.step_log import Snapshot, StepRecord
from minserve.text import Tokenizer
from minserve.weights import load

PHASES = ("schedule", "pack", "model", "sample", "commit", "text")


class Engine:
    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int | None = None,
        page_size: int | None = None,
        kv_cache_dtype: str | None = None,
        token_budget: int = 512,
        max_running: int = 64,
        prefix_caching: bool = True,
        sinks: int = 0,
        policy: type[Scheduler] = Scheduler,
        pool: type[PagePool] = PagePool,
        step: str | None = None,
        drafter: Drafter | str | None = None,
        adaptive: bool = True,
        overlap: bool | None = None,
        log_length: int = 4096,
        snapshots: bool = False,
        connector=None,
        **limits,
    ):
        """`limits` go to the policy: chunk, max_waiting, ageing. Without a tokenizer, prompts are token ids.

        page_size      tokens of a page: 16, or 64 with "int4", where the keys of a page share their scales
        kv_cache_dtype "int8", "fp8" or "int4" (quantized_cache.py); None: the model's own
        step       "plain" (model.py), "fused" (fused.py) or "graph" (graphs.py); None: the fastest that is possible
        drafter    speculative decoding: "ngram", "medusa", "exit", "draft" (drafters.py), or a Drafter; None: without
        adaptive   draft as many tokens as pay; False: as many as the drafter can
        overlap    schedule a step while the one before it runs; None: where something runs beside Python, on a GPU.
                   Not with a drafter: it has to see the tokens first
        connector  a cluster.connector.KVConnector, which takes prompts' keys and values to another engine

        Raises ValueError for limits that exclude each other, for a step that the model cannot take, and for a drafter
        that does not fit the model.
        """
        if drafter and overlap:
            raise ValueError(
                "a drafter continues the token of the last step, and overlap schedules before that one is known: "
                "use one of the two"
            )
        config, device = model.config, model.device
        page_size = page_size or page_for(kv_cache_dtype)
        num_pages = num_pages or default_pages(model, page_size, kv_cache_dtype)
        window = None if None in config.windows else max(config.windows)
        self.model, self.tokenizer = model, tokenizer
        self.pages = pool(
            num_pages, page_size, window=window, sinks=sinks, prefix_caching=prefix_caching,
            whole=kv_cache_dtype == "int4",
        )  # fmt: skip
        self.scheduler = policy(self.pages, token_budget, max_running, **limits)
        shape = num_pages, page_size, model.dtype, device, sinks
        self.cache = cache_for(kv_cache_dtype, config, *shape, seats=max_running, tokens=token_budget)
        self.room = config.context if window else min(config.context, num_pages * page_size + 1)
        self.packer = Packer(max_running, self.room, page_size, device)
        self.sampler = Sampler(max_running, config.vocab_size, device)
        drafter = drafter_for(drafter, model) if isinstance(drafter, str) else drafter
        self.compute = self._computer(step, drafter)
        self.overlap = device.type == "cuda" and not drafter if overlap is None else overlap
        self.speculation = Speculation(drafter, self, adaptive) if drafter else None
        self.flight: Flight | None = None  # the step that runs while the next one is scheduled
        self.outputs: dict[int, Output] = {}  # by request id, until they end
        self.log: deque[StepRecord] = deque(maxlen=log_length)
        self.snapshots, self._ids, self._clock = snapshots, itertools.count(), time.perf_counter
        self.connector = connector
        if connector:
            connector.attach(self)

    def _computer(self, step: str | None, drafter: Drafter | None):
        """compute(batch) -> logits, what is drawn already, states: one of the three roads of a step."""
        fusible = isinstance(self.model, Model)  # not so: who only calls itself a model, such as a test's
        step = step or ("graph" if fusible else "plain")
        if step not in ("plain", "fused", "graph") or (step != "plain" and not fusible):
            raise ValueError(
                f'step is {step!r}: use "plain", or for a minserve.model.Model "fused" or "graph"'
            )
        if step == "fused":
            return Fused(self.model, self.cache, self.packer.tokens.shape[1])
        if step == "graph":
            drafts = ()
            if drafter:
                drafts = drafter.k, drafter.branches and self.cache.branches, self.scheduler.token_budget
            return Graphs(self.model, self.cache, self.packer, self.sampler, sys.stderr.isatty(), *drafts)
        return self._plain

    def _plain(self, batch: Batch) -> tuple:
        attend = self.cache.attend_for(batch)
        if not self.speculation:
            return self.model(batch.ids, batch.positions, attend, rows=batch.last), None, None
        states = self.model.states(batch.ids, batch.positions, attend, rows=batch.last)
        return self.model.scores(states), None, states

    # ------------------------------------------------------------ the door
    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        salt: bytes = b"",
        **elsewhere,
    ) -> list[Output]:
        """Queue one prompt: params.n outputs. `timeout`: seconds from now. `salt`: only equal salts share prefixes.

        elsewhere: `made`, tokens of the answer that another engine made; `kv`, keys and values it computed; `key`,
        under which the connector shall hand out this request's own (cluster/connector.py). `constraint`: which tokens
        may come next (structured.py).
        Raises ValueError for a prompt or parameters that cannot be served, QueueFull when too many wait.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        outputs = self.make(
            prompt, params or SamplingParams(), priority=priority, deadline=deadline, salt=salt, **elsewhere
        )
        self.queue(outputs)
        return outputs

    def make(self, prompt: str | list[int], params: SamplingParams, **fields) -> list[Output]:
        """The outputs of one prompt, checked but not yet queued. Raises ValueError."""
        if params.n > self.scheduler.max_waiting:
            raise ValueError(
                f"n is {params.n:,}, and the queue takes {self.scheduler.max_waiting:,}: ask for fewer completions"
            )
        prompt, most, stop_ids = self._checked(prompt, params)
        made, kv = fields.get("made", ()), fields.get("kv")
        if made and (params.n > 1 or len(made) >= most):
            raise ValueError(
                f"{len(made)} tokens are made already, of n {params.n} answers of {most} tokens: only one answer that "
                f"is not complete can be continued"
            )
        if kv is not None:
            kv.check(self.cache)
        if fields.get("constraint") and params.min_tokens:
            raise ValueError(
                "a grammar says where the answer ends, so min_tokens cannot: ask for one of the two"
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        outputs: list[Output] = []
        for index in range(params.n):
            leader = outputs[0].request if outputs else None
            request = Request(
                next(self._ids), prompt, params, most, seed_of(seed, index), stop_ids, leader=leader, **fields
            )
            outputs.append(Output(request, index, self.tokenizer))
        for token in made:
            outputs[0].push(token)
        self.scheduler.check_fits(outputs[0].request)
        return outputs

    def queue(self, outputs: list[Output]) -> None:
        """Hand them to the scheduler, all or none. Raises QueueFull."""
        for i, output in enumerate(outputs):
            try:
                self.scheduler.add(output.request)
            except QueueFull:
                self.abort(outputs[:i])
                raise
            self.outputs[output.request.id] = output

    def _checked(
        self, prompt: str | list[int], params: SamplingParams
    ) -> tuple[list[int], int, frozenset[int]]:
        """The prompt's ids, how many tokens it may make, and the ids that stop it. Raises ValueError."""
        config = self.model.config
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "the prompt is text, but the engine has no tokenizer: give token ids, or Engine(model, tokenizer)"
                )
            prompt = self.tokenizer.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "stop strings need text, and the engine has no tokenizer: use stop_token_ids, or give it one"
            )
        check_vocabulary(params, config.vocab_size)
        most = tokens_to_make(config, prompt, params)
        if params.max_tokens is None:  # as much as there is room for: in the context, and in the pool
            most = min(most, max(1, self.room - len(prompt)))
        eos = self.tokenizer.eos_token_ids if self.tokenizer else ()
        ends = () if params.ignore_eos else {*config.eos_token_ids, *eos}
        return list(prompt), most, frozenset({*params.stop_token_ids, *ends})

    # ------------------------------------------------------------ the loop's body
    def step(self) -> list[tuple[Output, str]]:
        """One turn. Returns (output, its new text) for each that got a token or ended."""
        marks = [self._clock()]
        late = self.scheduler.expire(time.monotonic())
        if self.speculation:
            self.speculation.allow(self.scheduler.running)
        plan = self.scheduler.schedule()
        if self.scheduler.brought:
            late += self._load()
            plan = [work for work in plan if work[0].status is Status.RUNNING]
        marks.append(self._clock())
        news = [self._end(request) for request in late]
        record = self._record(marks[0]) if plan or late or self.flight else None
        if plan or self.flight:
            news += self._turn(plan, record, marks)
        if record:
            record.seconds = {
                phase: end - begin for phase, (begin, end) in zip(PHASES, itertools.pairwise(marks))
            }
            record.finished = {out.request.id: out.finish_reason for out, _ in news if out.finished}
            self.log.append(record)
        return news

    def _turn(self, plan: Plan, record: StepRecord, marks: list[float]) -> list[tuple[Output, str]]:
        """Send this step off; then land it, or with `overlap` the one before it, which ran in the meantime."""
        landing, self.flight = self.flight, None
        try:
            if self.speculation:
                plan = self.speculation.propose(plan)
            flight = self._launch(plan, record, marks)
        except Exception:  # whatever it is: it must not take the others along
            news = self._land(landing, []) + self._one_by_one(plan, record)
        else:
            if self.overlap and not any(r.constraint for r, _ in plan):
                self.flight = flight
                news = self._land(landing, marks)
            else:  # what a grammar allows next depends on this step's token: nothing is scheduled before it is here
                news = self._land(landing, []) + self._land(flight, marks)
        marks += [self._clock()] * (len(PHASES) + 1 - len(marks))
        if landing is None:
            return news
        heard: dict[Output, str] = {}  # who got a token of two steps hears of both at once
        for output, delta in news:
            heard[output] = heard.get(output, "") + delta
        return list(heard.items())

    def _launch(self, plan: Plan, record: StepRecord, marks: list[float]) -> "Flight | None":
        """Pack, compute, draw; then every request of the plan counts as one step further."""
        if not plan:
            marks += [self._clock()] * 2
            return None
        batch = self.packer.pack(plan)
        for r in batch.fresh:
            self.sampler.put(r.seat, r.params, r.seed, r.prompt, r.outputs, r.stop_ids, r.constraint)
        self.cache.copy(self.pages.copies)
        marks.append(self._clock())
        logits, drawn, states = self.compute(batch)
        if self.connector:
            self.connector.wait_for_save(batch)
        marks.append(self._clock())
        if self.speculation:
            made, logprobs, kept = self.speculation.judge(batch, logits, drawn, states)
        else:
            sampled = self.sampler(logits, batch.seats, batch.made, drawn)
            self.packer.note(batch, sampled.tokens)
            made, kept = ToHost(sampled.tokens), None
            logprobs = sampled.logprobs and [[its] for its in sampled.logprobs]
        self.pages.copies.clear()
        record.rows += batch.rows(kept)
        return Flight(batch, self.scheduler.advance(batch.plan), made, logprobs)

    def _land(self, flight: "Flight | None", marks: list[float]) -> list[tuple[Output, str]]:
        """Wait for a step's tokens, settle it, then give each reader what is new."""
        if flight is None:
            return []
        made, plan, paid = flight.tokens, flight.batch.plan, flight.batch.paid
        if isinstance(made, ToHost):
            made = list(zip(made.tolist()))
        marks.append(self._clock())
        tokens, news, ends = [[]] * len(plan), [], flight.ends
        for b, its in zip(paid, made):
            tokens[b] = its
            if its[-1] < 0 and plan[b][0].status is not Status.FINISHED:
                why = "its logits hold NaN; the model's weights or its cache are broken"
                self._fail(plan[b][0], ValueError(why))
        self.scheduler.settle(plan, ends, tokens)
        marks.append(self._clock())
        for b, its in zip(paid, flight.logprobs or itertools.repeat(None)):
            if (output := self.outputs.get(plan[b][0].id)) is not None:
                news.append(self._tell(output, ends[b], its))
        marks.append(self._clock())
        return news

    def _tell(self, output: Output, at: int, logprobs) -> tuple[Output, str]:
        """A request's new tokens, tokens[at:], as text. Trouble with one reader's text is that reader's alone."""
        request, delta, stopped, complete = output.request, "", False, False
        try:
            for token in request.tokens[at:]:
                if token == UNKNOWN:
                    break
                text, stopped = output.push(token, logprobs and logprobs.pop(0))
                delta += text
                if stopped:  # drafts behind the end were right in vain
                    del request.tokens[len(request.prompt) + output.told :]
                    break
                complete = request.constraint is not None and request.constraint.accept(token)
        except Exception as error:
            self._fail(request, error)
        if stopped or complete:
            self.scheduler.finish(request, "stop")
            request.finish_reason = "stop"  # also where this was the last token allowed
        if stopped:
            del self.outputs[request.id]
        elif request.status is Status.FINISHED:
            delta += self._end(request)[1]
        return output, delta

    def _end(self, request: Request) -> tuple[Output, str]:
        output = self.outputs.pop(request.id)
        try:
            delta, stopped = output.end()
        except Exception as error:
            output.error, request.finish_reason = output.error or error, "error"
            return output, ""
        if stopped and request.finish_reason == "length":
            request.finish_reason = "stop"  # what was held back completed a stop string
        return output, delta

    # ------------------------------------------------------------ when something goes wrong
    def _one_by_one(self, plan: Plan, record: StepRecord) -> list[tuple[Output, str]]:
        """A step failed. Run its requests alone: those that fail again are at fault. Nothing was settled yet."""
        news = []
        for request, num_tokens in plan:
            if request.status is not Status.RUNNING:
                continue  # it ended with the step before this one
            request.dirty = 0  # its seat may be half written
            num_tokens -= len(request.draft.tokens) if request.draft else 0
            request.draft = None
            try:
                flight = self._launch([(request, self.cache.again(request, num_tokens))], record, [])
            except Exception as its_own:
                self._fail(request, its_own)
                news.append(self._end(request))
            else:
                news += self._land(flight, [])
        return news

    def _fail(self, request: Request, error: Exception) -> None:
        self.outputs[request.id].error = error
        self.scheduler.finish(request, "error")
        request.finish_reason = "error"

    def _load(self) -> list[Request]:
        """Keys and values from elsewhere into their pages. Returns those for whom that failed: they have ended."""
        failed = []
        for request, computed in self.scheduler.brought:
            kv, request.kv = request.kv, None  # once: after a preemption it computes them itself
            try:
                kv.load(self.cache, request.pages, computed)
            except Exception as error:
                self._fail(request, error)
                failed.append(request)
        return failed

    def abort(self, outputs: Iterable[Output]) -> list[tuple[Output, str]]:
        """End these now, whatever they are doing. Their pages are back when this returns, with (output, last text)."""
        news = []
        for output in outputs:
            if not output.finished:
                self.scheduler.finish(output.request, "abort")
                if output.request.id in self.outputs:
                    news.append(self._end(output.request))
        return news

    def close(self) -> list[tuple[Output, str]]:
        """Abort everything."""
        self.flight = None
        return self.abort(list(self.outputs.values()))

    # ------------------------------------------------------------ the log
    def _record(self, start: float) -> StepRecord:
        """What the step found; _settle adds the rows it computed."""
        s, pages = self.scheduler, self.pages
        return StepRecord(
            s.steps, start, {}, [], [r.id for r in s.waiting[:64]], len(s.running), len(pages.free),
            len(pages.cached), pages.in_use, list(s.gave_way), {},
            self._snapshot() if self.snapshots else None, max(0, len(s.waiting) - 64),
        )  # fmt: skip

    def _snapshot(self) -> Snapshot:
        pages = self.pages
        known = {page: node.key.hex()[:6] for page, node in enumerate(pages.nodes) if node}
        tables = {}
        for r in self.scheduler.running:
            stale = range(
                pages.sink_pages, r.returned
            )  # they left the window, and may be somebody else's by now
            tables[r.id] = [-1 if i in stale else page for i, page in enumerate(r.pages)]
        return Snapshot(tables, list(pages.references), known, list(pages.cached))


class Flight(NamedTuple):
    """A step that was sent off, with what has to be done when its tokens arrive."""

    batch: Batch
    ends: list[int]  # how far each row is computed then
    tokens: ToHost | list[list[int]]  # of batch.paid: one each, or with drafts several
    logprobs: list[list] | None  # of each token; None if nobody asks


class LLM(Engine):
    """An engine that runs until everything it was given is answered."""

    def __init__(self, model: Model | str | None = None, tokenizer: Tokenizer | None = None, **options):
        """`model`: a Model, or the name of one (folder, hub id; None is SmolLM2-135M-Instruct). Options: see Engine."""
        if model is None or isinstance(model, str):
            folder = resolve(model)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            model, tokenizer = load(folder, device=device), tokenizer or Tokenizer.load(folder)
        super().__init__(model, tokenizer, **options)

    def generate(
        self,
        prompts: str | list,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        each: Callable[[Output, str], None] | None = None,
    ) -> list[list[Output]]:
        """Answer every prompt (text, or token ids): params.n outputs for each. each(output, text) hears them grow.

        Raises ValueError, naming the prompt, before any work is done, if one of them can never be served.
        """
        single = isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], int)
        prompts = [prompts] if single else list(prompts)
        all_params = (
            list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(prompts)
        )
        if len(all_params) != len(prompts):
            raise ValueError(
                f"{len(prompts):,} prompts and {len(all_params):,} params: give one for all, or one for each"
            )
        results = []
        for i, (prompt, its) in enumerate(zip(prompts, all_params)):
            try:
                results.append(self.make(prompt, its))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from None
        self._run_all(results, sys.stderr.isatty() if progress is None else progress, each)
        return results

    def _run_all(self, results: list[list[Output]], progress: bool, each) -> None:
        unqueued = deque(results)
        with tqdm(total=sum(map(len, results)), unit="answer", disable=not progress) as bar:
            try:
                while unqueued or self.outputs:
                    while unqueued and self.scheduler.room >= len(unqueued[0]):
                        self.queue(unqueued.popleft())
                    for output, delta in self.step():
                        if each:
                            each(output, delta)
                        bar.update(output.finished)
            except BaseException:  # Ctrl-C too: leave nothing behind
                self.close()
                raise


def default_pages(model: Model, page_size: int, kind: str | None = None) -> int:
    """On a GPU, what 80 % of the free memory holds; elsewhere 16,384 tokens, which cost memory only once written."""
    c = model.config
    if model.device.type != "cuda":
        return pages_for(16_384, page_size)
    free, _ = torch.cuda.mem_get_info()
    shape = c.num_layers, c.num_kv_heads, c.head_dim
    return max(
        1, int(0.8 * free / (page_size * bytes_per_token(*shape, model.dtype.itemsize, kind, page_size)))
    )
