"""Text that the model makes by itself: what a drafter learns from, because it is what a drafter has to guess.

    opening                     the chat template up to an empty user turn
      -> question               sampled at temperature 1: the model asks what it was trained to be asked
      -> answer                 every second one greedy, the others at temperature 0.7

No data set is needed, and the answers are the target's own: a drafter that learns them learns this model, not the
language. A model without a chat template goes on from one token, another for each conversation.

Conversations are numbered; a number decides the seed, and with it the text. A finished one is a line of a file, so an
interrupted run goes on with the numbers that are missing.

Cost     a question and an answer each, at the engine's speed with many seats
Story    notebooks/12_medusa_and_self_speculation.ipynb
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from minserve.engine import Engine
from minserve.model import Model
from minserve.request import SamplingParams, seed_of
from minserve.study import Conversation
from minserve.text import Tokenizer

QUESTION, ANSWER = 96, 320  # most tokens of each
SEATS = 192
MARK = "\ue000"  # a private-use character stands where the question goes


def turns(model: Model, tokenizer: Tokenizer | None, number: int) -> tuple[list[int], list[int]]:
    """Ids before the user's words, and from their end to the beginning of the answer ([]: there are no turns)."""
    if tokenizer is None or not tokenizer.hf.chat_template:
        return [number * 2_654_435_761 % model.config.vocab_size], []
    text = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tokenizer.hf.encode(part, add_special_tokens=False) for part in text.split(MARK))
    return before, after


def read(path: Path) -> list[Conversation]:
    """What is there, in order of number. A last line that was cut short does not count."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [Conversation(**json.loads(line)) for line in lines if line.endswith("}")]
    return sorted(found)


def write(
    path: Path,
    model: Model,
    tokenizer: Tokenizer | None,
    numbers: Iterable[int],
    seed: int,
    seats: int = SEATS,
) -> list[Conversation]:
    """Make the conversations of these numbers that the file lacks; return all of them, in order."""
    numbers = list(numbers)
    have = {c.number for c in read(path)}
    if missing := [n for n in numbers if n not in have]:
        room = -(-(QUESTION + ANSWER + 64) // 16)  # pages of one seat
        engine = Engine(model, tokenizer, max_running=seats, num_pages=seats * room, token_budget=2048)
        if path.is_file() and not path.read_text().endswith("\n"):
            path.write_text(
                "".join(line for line in path.read_text().splitlines(True) if line.endswith("\n"))
            )
        with path.open("a") as file, tqdm(total=len(missing), desc="the model talks", unit="answer") as bar:
            for conversation in converse(engine, missing, seed):
                file.write(json.dumps(conversation._asdict()) + "\n")
                file.flush()
                bar.update()
    return [c for c in read(path) if c.number in set(numbers)]


def converse(engine: Engine, numbers: list[int], seed: int):
    """Yield conversations as they end. A seat that becomes free goes to the next question at once."""
    asking, answering, waiting = {}, {}, list(reversed(numbers))
    while waiting or engine.outputs:
        while waiting and len(engine.outputs) < engine.scheduler.max_running:
            number = waiting.pop()
            before, after = turns(engine.model, engine.tokenizer, number)
            if after:
                params = SamplingParams(
                    QUESTION, 1.0, top_p=0.95, seed=seed_of(seed, 2 * number), stop_token_ids=after[:1]
                )
                asking[engine.add(before, params)[0].request.id] = number
            else:
                answering |= _answer(engine, before, number, seed)
        for output, _ in engine.step():
            request = output.request
            if not output.finished:
                continue
            if (number := asking.pop(request.id, None)) is not None:
                after = turns(engine.model, engine.tokenizer, number)[1]
                answering |= _answer(engine, request.tokens + after, number, seed)
            elif (number := answering.pop(request.id, None)) is not None:
                ended = list(request.stop_ids)[:1] if output.finish_reason == "stop" else []
                begin = len(request.prompt)
                yield Conversation(number, request.params.temperature, begin, request.tokens + ended)


def _answer(engine: Engine, prompt: list[int], number: int, seed: int) -> dict[int, int]:
    temperature = 0.0 if number % 2 == 0 else 0.7
    params = SamplingParams(
        min(ANSWER, engine.room - len(prompt)), temperature, seed=seed_of(seed, 2 * number + 1)
    )
    return {engine.add(prompt, params)[0].request.id: number}
