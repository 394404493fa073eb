"""What speculation is measured on: prompts whose answers copy from them, and questions whose answers do not.

    copy    a passage to repeat, one with slips to correct, one to go on with, a table to copy, JSON to lay out anew
    free    questions of several kinds; parts of drafters were trained on none of them

Passages are paragraphs of Python's own manual (pydoc's topics), tables and JSON are its HTTP codes: real text that is
wherever Python is. Answers end where the model ends them without speculation, or at `most` tokens; those lengths are
then everybody's, so that equal work is compared.
"""

import json
import random
import re
from http import HTTPStatus
from pydoc_data.topics import topics

from minserve.bench.workload import PAGE, Work, ragged
from minserve.config import SHAPES
from minserve.engine import LLM
from minserve.fetch import resolve
from minserve.model import Model
from minserve.pages import pages_for
from minserve.request import SamplingParams
from minserve.text import Tokenizer

PASSAGE, SLIPS = (260, 420), 6  # characters of a passage; letters of it that change places
QUESTIONS = [
    "Why does the moon look larger near the horizon than high in the sky?",
    "Write a short poem about a lighthouse keeper who is afraid of the dark.",
    "My bread dough does not rise. What may have gone wrong, and what can I try?",
    "Explain to a ten-year-old what a prime number is and why people care about them.",
    "Write a Python function that finds the longest word in a sentence.",
    "Plan a weekend in Lisbon for two people who like old trams and good coffee.",
    "What were the main causes of the fall of the Western Roman Empire?",
    "Write an e-mail to my landlord about a heater that has been broken for a week.",
    "A train leaves at 9:40 and arrives at 13:05. How long was the journey? Show your steps.",
    "Compare learning the violin with learning the piano as an adult beginner.",
    "Tell the story of a fox who opens a bakery in a small mountain village.",
    "How do vaccines teach the immune system to recognise a disease?",
    "Give me five names for a shop that repairs bicycles, and say what each one suggests.",
    "Which is heavier, a litre of water or a litre of oil, and how could I show it at home?",
    "Describe the taste of fresh ginger to somebody who has never eaten it.",
    "What should I think about before I adopt an elderly dog?",
    "Is it better to pay off a loan early or to keep the money as savings?",
    "Name three rivers in Africa and say through which countries they flow.",
    "How can I help a friend who is nervous about her first day in a new job?",
    "Write the opening paragraph of a mystery that begins in an empty library.",
]


def copy_prompts(count: int) -> list[str]:
    """Of five kinds, in turn."""
    texts, rng, codes = passages(), random.Random(0), list(HTTPStatus)
    prompts = []
    for i in range(count):
        text, first = texts[i % len(texts)], 5 * (i // 5) % (len(codes) - 8)
        some = [(code.value, code.phrase) for code in codes[first : first + 8]]
        table = "\n".join(
            ["| code | phrase |", "|---|---|", *(f"| {code} | {said} |" for code, said in some)]
        )
        prompts.append(
            [
                f"Repeat this text exactly, word for word:\n\n{text}",
                f"Correct the spelling of this text and write out all of it:\n\n{slips(text, rng)}",
                f"Write this text down again, then go on with it:\n\n{text}",
                f"Copy this table, all rows of it, as it is:\n\n{table}",
                f"Write this JSON again, one entry per line:\n\n{json.dumps(dict(some))}",
            ][i % 5]
        )
    return prompts


def passages() -> list[str]:
    """One paragraph of prose of each topic that has one of the length."""
    found: dict[str, None] = {}
    for name in sorted(topics):
        paragraphs = [re.sub(r"\s+", " ", p).strip() for p in topics[name].split("\n\n") if p[:1].isalpha()]
        fitting = [p for p in paragraphs if PASSAGE[0] <= len(p) <= PASSAGE[1] and p.endswith(".")]
        found |= dict.fromkeys(fitting[:1])
    return list(found)


def slips(text: str, rng: random.Random) -> str:
    """Some neighbouring letters of a word change places."""
    letters = list(text)
    inside = [i for i in range(len(text) - 1) if text[i : i + 2].isalpha()]
    for i in rng.sample(inside, SLIPS):
        letters[i : i + 2] = letters[i + 1], letters[i]
    return "".join(letters)


# ---------------------------------------------------------------- as work
def works(name: str | None, model: Model, count: int, most: int) -> dict[str, Work]:
    """{"copy": ..., "free": ...}, `count` prompts each. A random model has no tokenizer, so it gets random tokens."""
    if not spoken(name):
        vocab, lengths = model.config.vocab_size, lambda rng: most
        return {
            kind: ragged(vocab, count, (24, 32), lengths, seed=i) for i, kind in enumerate(("copy", "free"))
        }
    tokenizer = Tokenizer.load(resolve(name))
    texts = {"copy": copy_prompts(count), "free": [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]}
    said = {
        kind: [tokenizer.chat([{"role": "user", "content": text}]) for text in its]
        for kind, its in texts.items()
    }
    return {kind: Work(prompts, natural(model, tokenizer, prompts, most)) for kind, prompts in said.items()}


def spoken(name: str | None) -> bool:
    """Has this model a tokenizer? Shapes with random weights have none."""
    return name not in SHAPES and not (name or "").startswith("tiny-")


def natural(model: Model, tokenizer: Tokenizer, prompts: list[list[int]], most: int) -> list[int]:
    """Tokens of each answer where nothing speculates; two at least, the first one being the prompt's."""
    pages = len(prompts) * pages_for(max(map(len, prompts)) + most, PAGE)
    llm = LLM(model, tokenizer, page_size=PAGE, num_pages=pages, max_running=len(prompts))
    answers = llm.generate(prompts, SamplingParams(max_tokens=most), progress=False)
    return [max(2, len(output.tokens)) for (output,) in answers]
