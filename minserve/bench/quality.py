"""What quantized weights cost in quality: KL from the full model, perplexity, and what it goes on to say.

    KL            mean over positions of the evaluation text, in nats (lab.quality); no calibration has seen it.
                  Weights as they are stored, computed in fp32: so it is theirs alone. What 16-bit arithmetic does to
                  the full model is a row of its own; INT8, which is near that, is also compared in 16 bits
    perplexity    of the same text, in fp32
    weights held  bytes of the whole model, embedding included
    layer         seconds to quantize one
    greedy        20 prompts continued greedily: the share of tokens equal to the full model's, position by position
    continuation  the same 20 side by side; measured is where they first differ, a sample for each model that is named

Gates   INT8 per channel: KL at most 0.005. INT4 in groups of 128: GPTQ and AWQ each nearer than rounding to nearest.
Known   SmolLM2-135M from the package index was stored in 4 bits before it came here (GGUF Q4_1: groups of 32 with a
        minimum). Asymmetric groups of 32 find those integers again, which says nothing about the method: none here.
Story   notebooks/09_quantization.ipynb
"""

from dataclasses import dataclass, field

from minserve import fetch
from minserve.bench.common import TINY, Options, clean_up, label, load, random_prompt
from minserve.calibration import TOKENS, calibration_text, evaluation_text, held_bytes, quantize_model
from minserve.config import SHAPES
from minserve.engine import LLM
from minserve.lab.quality import WINDOW, divergence_of, logits_of, quality
from minserve.lab.report import Report, Row
from minserve.quantization import Scheme
from minserve.request import SamplingParams
from minserve.smoothquant import W8A8Linear
from minserve.text import Tokenizer

INT8_KL, PROMPT, NEW = 0.005, 48, 24
EVALUATION, PROMPTS = 4096, 20


@dataclass(frozen=True)
class Case:
    name: str
    method: str
    scheme: Scheme
    more: dict = field(default_factory=dict)


CASES = [
    Case("INT8, rounded", "rtn", Scheme(8)),
    Case("INT4 g128, rounded", "rtn", Scheme(4, 128)),
    Case("INT4 g128, GPTQ", "gptq", Scheme(4, 128)),
    Case("INT4 g128, AWQ", "awq", Scheme(4, 128)),
    Case("INT4 g128, GPTQ in act-order", "gptq", Scheme(4, 128), {"act_order": True}),
    Case("INT4 g64, rounded", "rtn", Scheme(4, 64)),
    Case("INT4 g64, GPTQ", "gptq", Scheme(4, 64)),
    Case("INT4 g32, rounded", "rtn", Scheme(4, 32)),
    Case("INT8, GPTQ", "gptq", Scheme(8)),
    Case("W8A8", "w8a8", Scheme(8)),
    Case("W8A8, SmoothQuant", "smoothquant", Scheme(8)),
]
TOLD = [case.name for case in CASES[:4]]  # whose continuations are printed


def run(options: Options) -> Report:
    report = options.report()
    texts = Texts.of(options)
    model = load(options.model, options.dtype)
    held, full, name = held_bytes(model), continuations(model, texts.prompts), label(options.model)
    sixteen = logits_of(model, texts.evaluation)
    reference = logits_of(model.float(), texts.evaluation)
    _, perplexity = quality(model, reference, texts.evaluation)
    report.add(Row(f"{name}: perplexity", "ppl", [perplexity]))
    report.add(Row(f"{name}: weights held", "B", [held]))
    noise = [divergence_of(*pair) for pair in zip(reference, sixteen)]
    report.add(Row(f"{name}, computed in {options.dtype_name}: KL", "nats", noise))
    said, divergence = {name: full}, {}
    for done, (case, _) in enumerate(options.shares(CASES, least=4), 1):
        del model
        clean_up()
        model = load(options.model, options.dtype)
        its = quantize_model(model, case.method, case.scheme, texts.calibration, progress=False, **case.more)
        said[case.name] = continuations(model, texts.prompts)
        if case.name.startswith("INT8"):  # as one runs it: both models in 16 bits
            kl, _ = quality(model, sixteen, texts.evaluation)
            divergence[f"{case.name}, computed in {options.dtype_name}"] = kl
            report.add(Row(f"{case.name}, computed in {options.dtype_name}: KL", "nats", [kl]))
        divergence[case.name], perplexity = quality(model.float(), reference, texts.evaluation)
        equal = [sum(a == b for a, b in zip(*pair)) / len(pair[0]) for pair in zip(full, said[case.name])]
        report.add(Row(f"{case.name}: KL", "nats", [divergence[case.name]], note=" ".join(str(its).split())))
        report.add(Row(f"{case.name}: perplexity", "ppl", [perplexity]))
        report.add(Row(f"{case.name}: weights held", "B", [its.bytes_after]))
        report.add(Row(f"{case.name}: layer", "s", its.layers))
        report.add(Row(f"{case.name}: greedy", "share", equal, 1.0))
        options.progress("models")(done, len(CASES))
    gates(report, divergence)
    side_by_side(report, texts, said)
    last = report.rows[-1]
    report.rows[-1] = Row(last.case, last.unit, last.samples, note=options.note(last.note))
    return report


def gates(report: Report, divergence: dict[str, float]) -> None:
    """How many times better than what is asked."""
    for name, kl in divergence.items():
        if name.startswith("INT8"):
            report.add(Row(f"{name}: {INT8_KL} nats / KL", "x", [INT8_KL / max(kl, 1e-9)] * 3, 1.0, 1.0))
    rounded = divergence[CASES[1].name]
    for case in CASES[2:4]:
        better = rounded / max(divergence[case.name], 1e-9)
        report.add(Row(f"{case.name}: KL of rounded / its KL", "x", [better] * 3, 1.0, 1.0))


# ---------------------------------------------------------------- text
@dataclass
class Texts:
    calibration: list[list[int]]
    evaluation: list[int]
    prompts: list[list[int]]
    tokenizer: Tokenizer | None  # None: random ids, for random weights

    @classmethod
    def of(cls, options: Options) -> "Texts":
        tokens, windows = (512, 1) if options.quick else (EVALUATION, TOKENS // WINDOW)
        many = 4 if options.quick else PROMPTS
        if options.model in SHAPES | TINY:
            ids = random_prompt((SHAPES | TINY)[options.model], max(tokens, many * PROMPT))
            calibration, tokenizer = [ids[:256], ids[256:512]], None
        else:
            tokenizer = Tokenizer.load(fetch.resolve(options.model))
            ids = evaluation_text(tokenizer, tokens)
            calibration = calibration_text(tokenizer, windows * WINDOW)
        apart = len(ids) // many
        return cls(calibration, ids, [ids[i * apart :][:PROMPT] for i in range(many)], tokenizer)

    def __getitem__(self, ids: list[int]) -> str:
        return " ".join(self.tokenizer.decode(ids).split()) if self.tokenizer else str(ids)


def continuations(model, prompts: list[list[int]]) -> list[list[int]]:
    """NEW tokens after each, greedily."""
    integers = any(isinstance(module, W8A8Linear) for module in model.modules())  # no fast step has those
    llm = LLM(model, step="plain" if integers else None, max_running=len(prompts))
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    return [outputs[0].tokens for outputs in llm.generate(prompts, params, progress=False)]


def side_by_side(report: Report, texts: Texts, said: dict[str, list[list[int]]]) -> None:
    (_, full), *others = said.items()
    for i, prompt in enumerate(texts.prompts):
        alike = [first_difference(full[i], its[i]) for name, its in others if name in TOLD]
        told = " | ".join(f"{name}: {texts[its[i]]}" for name, its in list(said.items())[: len(TOLD) + 1])
        report.add(Row(f"continuation {i + 1}", "tokens", alike, note=f"{texts[prompt]} ... {told}"))


def first_difference(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))


# ---------------------------------------------------------------- what is shown of it
def markdown(report: Report, speed: Report) -> str:
    """The README's table: models down; KL, perplexity, bytes, and one sequence's rate from `bench decode-quant`."""
    name = report.rows[0].case.split(":")[0]
    names = [
        name,
        *(case.name for case in CASES if any(row.case == f"{case.name}: KL" for row in report.rows)),
    ]
    lines = [
        "| weights | KL, nats | perplexity | MB held | tok/s, one sequence |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for its in names:
        kl = "" if its == name else f"{report.row(f'{its}: KL').median:.4f}"
        rate = rate_of(its, speed) if its in (name, *TOLD) else ""
        perplexity, held = (report.row(f"{its}: {what}").median for what in ("perplexity", "weights held"))
        shown = "bfloat16" if its == name else its
        lines.append(f"| {shown} | {kl} | {perplexity:.2f} | {held / 1e6:.0f} | {rate} |")
    return "\n".join(lines)


def rate_of(name: str, speed: Report) -> str:
    """How weights were rounded does not change how fast they are read."""
    kind = {"INT8": "int8", "INT4": "int4"}.get(name[:4], "bfloat16")
    return f"{next(row for row in speed.rows if f' {kind}, ' in row.case and row.unit == 'tok/s').median:.0f}"
