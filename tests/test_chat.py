"""`python -m minserve chat` as a user meets it: piped, in a real terminal with Ctrl-C, and with bad arguments."""

import os
import re
import select
import subprocess
import sys
import time

import pytest

from minserve.chat import Conversation
from minserve.prefill_decode import generate
from minserve.request import SamplingParams
from minserve.text import Tokenizer
from minserve.weights import load

pytestmark = pytest.mark.slow  # processes and whole commands: left out of `make quick`

PAGE = 16
CHAT = [sys.executable, "-m", "minserve", "chat"]


def chat(*args, stdin=""):
    return subprocess.run(
        [*CHAT, *args], input=stdin, capture_output=True, text=True, timeout=240, encoding="utf-8"
    )


@pytest.fixture(scope="module")
def parts(smollm):
    return load(smollm), Tokenizer.load(smollm)


def answer_of(parts, messages, n):
    model, tokenizer = parts
    ids = list(generate(model, tokenizer.chat(messages), SamplingParams(max_tokens=n)))
    return tokenizer.decode(ids)


# ---------------------------------------------------------------- the conversation and its cache
def test_second_turn_reuses_the_cache_and_changes_no_token(parts):
    conversation, said = Conversation(*parts), []
    first = conversation.ask("Name a colour.", SamplingParams(max_tokens=12), said.append)
    second = conversation.ask("And another one?", SamplingParams(max_tokens=12), said.append)
    assert "".join(said) == first.text + second.text and len(said) > 4, "streamed in pieces, nothing lost"
    kept = (
        (first.prompt + first.tokens - 1) // PAGE * PAGE
    )  # the last token was made, not computed; full pages only
    assert first.reused == 0 and second.reused == kept > 0, "the prompt and the answer were kept"
    expected = answer_of(parts, [m for m in conversation.messages if m is not conversation.messages[-1]], 12)
    assert second.text == expected


@pytest.mark.parametrize("kind, page", [("int8", 16), ("int4", 64)])
def test_a_smaller_cache_keeps_the_conversation_too(parts, kind, page):
    conversation, messages = Conversation(*parts, kv_cache_dtype=kind), "Name a colour. " * 30
    first = conversation.ask(messages, SamplingParams(max_tokens=12), str)
    second = conversation.ask("And another one?", SamplingParams(max_tokens=4), str)
    assert conversation.engine.cache.kind == kind
    assert second.reused == (first.prompt + first.tokens - 1) // page * page > 0


@pytest.mark.parametrize("drafter", ["ngram", "medusa"])
def test_a_drafter_changes_no_word_and_saves_steps(parts, drafter):
    conversation = Conversation(*parts, drafter=drafter)
    text = (
        "The lighthouse keeper wrote down the weather every evening. On Monday the wind came from the north."
    )
    messages = [{"role": "user", "content": "Repeat this text word for word:\n\n" + text}]
    conversation.engine.speculation.adaptive = False  # else a busy machine decides whether drafts pay
    answer = conversation.ask(messages[0]["content"], SamplingParams(max_tokens=24), str)
    assert answer.text == answer_of(parts, messages, 24)
    assert conversation.engine.speculation.on and 0 < answer.steps < answer.tokens - 1


def test_a_bad_question_leaves_the_conversation_as_it_was(parts):
    conversation = Conversation(*parts)
    conversation.ask("Name a colour.", SamplingParams(max_tokens=4), str)
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="leave no room for an answer: the model's context holds 8,192"):
        conversation.ask("word " * 9000, SamplingParams(max_tokens=4), str)
    assert conversation.messages == before
    assert conversation.ask("Name a fruit.", SamplingParams(max_tokens=4), str).tokens > 0


# ---------------------------------------------------------------- the command
def test_piped(parts):
    result = chat("--stats", "--max-tokens", "8", stdin="Name a colour.\n\nAnd a fruit?\n")
    assert result.returncode == 0, result.stderr
    answers = result.stdout.strip().splitlines()
    assert answers[0] == answer_of(parts, [{"role": "user", "content": "Name a colour."}], 8)
    stats = re.findall(
        r"\[(\d+) prompt tokens, (\d+) of them from the cache \| first token \d+ ms \| \d+ tokens in \d+ steps, .*\]",
        result.stderr,
    )
    assert len(stats) == 2 and stats[0][1] == "0" and int(stats[1][1]) >= int(stats[0][0]) // PAGE * PAGE > 0


@pytest.mark.parametrize(
    "args, message",
    [
        (["--max-tokens", "0"], "max_tokens is 0; ask for a whole number of at least 1"),
        (["--temperature", "nan"], "temperature is nan; it must be a finite number"),
        (["--model", "no-such-folder"], "no-such-folder"),
        (["--prompt", "word " * 9000], "leave no room for an answer"),
    ],
)
def test_bad_arguments_say_what_to_change(args, message):
    result = chat(*args)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_stops_the_answer_and_not_the_program():
    import pty

    terminal, inside = pty.openpty()
    process = subprocess.Popen([*CHAT, "--stats"], stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
                               preexec_fn=make_controlling(inside))  # fmt: skip
    os.close(inside)
    try:
        expect(terminal, "> ")
        os.write(terminal, b"Count from one to five hundred in words, and explain each number at length.\n")
        expect(terminal, r"at length\.\s+\S+ \S+")  # the echo of the question, then the answer's first words
        os.write(terminal, b"\x03")
        expect(terminal, r"interrupted\]")
        os.write(terminal, b"What is the capital of France?\n")
        expect(terminal, r"tok/s \| (stop|length)\]|one token")
        os.write(terminal, b"/quit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(terminal)


def make_controlling(fd):
    def run():
        import fcntl
        import termios

        fcntl.ioctl(fd, termios.TIOCSCTTY, 0)  # so that \x03 becomes SIGINT, as in a user's terminal

    return run


def expect(terminal, pattern, seconds=120):
    """Read until `pattern` has appeared after what was read before."""
    text, end = "", time.monotonic() + seconds
    while not re.search(pattern, text):
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, f"{pattern!r} never came; the terminal shows:\n{text}"
        text += os.read(terminal, 4096).decode(errors="replace")
