"""Keys and values that were computed elsewhere: the same tokens as one engine, and nothing lost whatever is lost."""

import threading
import time
from argparse import ArgumentParser
from dataclasses import replace

import pytest
import torch

from minserve.cluster.connector import ROLES, KVConnector
from minserve.cluster.file_connector import FileConnector
from minserve.cluster.gloo_connector import GlooConnector
from minserve.cluster.inbox import Inbox, InProcess
from minserve.cluster.link import Link, Sender
from minserve.cluster.transfer import Part, Shape, checked_key
from minserve.cluster.transports import add_connector_arguments, connector_of
from minserve.engine import Engine
from minserve.request import SamplingParams
from minserve.weights import load

S = 8  # tokens of a page
OPTIONS = dict(num_pages=40, page_size=S, token_budget=16, max_running=4)
LENGTHS = [1, S - 1, S, S + 1, 2 * S, 40]  # 40: three chunks
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, frequency_penalty=0.5, repetition_penalty=1.3
)
MODES = ("whole", "layer")
PATIENCE = 60  # seconds: the longest anything here waits for what comes at once


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


def prompt_of(n: int, seed: int = 1) -> list[int]:
    return [(7 * i * i + 3 * seed) % 251 for i in range(n)]


def finish(engine):
    while engine.outputs:
        engine.step()


def run(engine, prompt, params, **fields):
    (output,) = engine.add(prompt, params, **fields)
    finish(engine)
    return output


class Two:
    """A producer and a consumer, each with an engine; `one` is the engine that does both."""

    def __init__(self, model, ends, **options):
        self.ends, options = ends, OPTIONS | options
        self.producer, self.consumer = ends
        self.prefill, self.decode = (Engine(model, connector=end, **options) for end in ends)
        self.one = Engine(model, **options)

    def hand_over(self, prompt, params, key="a"):
        """What the proxy does: one token there, the rest here. -> (output, what the producer said)."""
        first = run(self.prefill, prompt, replace(params, max_tokens=1, min_tokens=0), key=key)
        said = self.producer.request_finished(first.request)
        arrival = self.consumer.start_load_kv(key, prompt)
        assert arrival.wait()
        return run(self.decode, prompt, params, kv=arrival, made=said["token_ids"]), said

    def check(self):
        for engine in (self.prefill, self.decode):
            engine.pages.check([])
            assert engine.pages.in_use == 0 and not engine.outputs
        assert not self.producer._sending

    def close(self):
        for end in self.ends:
            end.close()


@pytest.fixture
def two(model):
    made = []

    def make(mode="whole", lease=20.0, link=None, **options):
        made.append(Two(model, InProcess.pair(mode=mode, lease=lease, link=link), **options))
        return made[-1]

    yield make
    for its in made:
        its.close()


# ---------------------------------------------------------------- equal to one engine
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("mode", MODES)
def test_the_tokens_are_those_of_one_engine(two, mode, kind):
    its = two(mode, kv_cache_dtype=kind)
    for n in [1, S + 1, 40] if kind == "fp8" else LENGTHS:  # a CPU is slow at fp8
        for i, params in enumerate((GREEDY, SAMPLED)):
            output, said = its.hand_over(prompt_of(n), params, f"{n}-{i}")
            assert output.tokens == run(its.one, prompt_of(n), params).tokens
            assert said["num_tokens"] == n and said["token_ids"] == output.tokens[:1]
    its.check()


@pytest.mark.parametrize("mode", MODES)
def test_the_consumer_computes_no_prompt(two, mode):
    its = two(mode)
    for n in LENGTHS:  # no two of them begin with a page of another
        output, _ = its.hand_over(prompt_of(n, seed=n), GREEDY, str(n))
        assert output.request.cached_tokens == 0  # transferred is not cached
    assert all(row.num_tokens == 1 for record in its.decode.log for row in record.rows)


def test_one_message_or_one_for_each_layer_of_each_chunk(two):
    for mode, messages in (("whole", 1), ("layer", 3 * 3)):
        its = two(mode)
        its.hand_over(prompt_of(40), GREEDY)
        assert its.producer.sender.sent == messages
        assert its.producer.get_finished() == ({"a"}, set()) and its.consumer.get_finished() == (set(), {"a"})
        assert its.producer.get_finished() == (set(), set())
    whole = 5 * its.producer.shape.page_bytes
    assert (
        whole == 5 * S * 3 * 2 * 2 * 16 * 4
    )  # 5 pages of 8 tokens, 3 layers, 2 heads, keys and values of 16 floats
    assert its.producer.sender.sent_bytes == whole  # chunks of 16 tokens end where pages do


def test_layers_leave_while_the_prompt_is_computed(two):
    its = two("layer")
    its.prefill.add(prompt_of(40), GREEDY, key="a")
    its.prefill.step()  # 16 of 40 tokens
    arrival = its.consumer.start_load_kv("a", prompt_of(40))
    for layer in range(3):
        part = its.consumer.take("a", layer, 10)
        assert (part.layer, part.first_page, part.end, len(part.tensors)) == (layer, 0, 16, 1)
    assert not arrival._here
    its.prefill.close()


def test_a_chunk_that_ends_inside_a_page_sends_the_page_again(two):
    its = two("layer", token_budget=12)
    assert its.hand_over(prompt_of(40), SAMPLED)[0].tokens == run(its.one, prompt_of(40), SAMPLED).tokens


def test_many_at_once_with_others_among_them(two):
    its = two("layer", num_pages=80)
    prompts = [prompt_of(n, seed=n) for n in (5, 23, 9, 33)]
    firsts = [
        its.prefill.add(p, replace(SAMPLED, max_tokens=1), key=str(i))[0] for i, p in enumerate(prompts)
    ]
    its.prefill.add(prompt_of(20, seed=99), GREEDY)  # nobody asks for this one
    finish(its.prefill)
    arrivals = [its.consumer.start_load_kv(str(i), p) for i, p in enumerate(prompts)]
    assert all(arrival.wait() for arrival in arrivals)
    outputs = [
        its.decode.add(p, SAMPLED, kv=kv, made=its.producer.request_finished(first.request)["token_ids"])[0]
        for p, kv, first in zip(prompts, arrivals, firsts)
    ]
    finish(its.decode)
    assert [o.tokens for o in outputs] == [run(its.one, p, SAMPLED).tokens for p in prompts]
    assert len(its.consumer.inbox) == 0
    its.check()


@pytest.mark.parametrize("mode", MODES)
def test_prefixes_that_either_side_knows(two, mode):
    its, shared = two(mode), prompt_of(2 * S)
    run(its.prefill, shared + [9], GREEDY)  # cached there: still all of it has to travel
    output, _ = its.hand_over(shared + prompt_of(11, seed=5), SAMPLED, "a")
    assert output.request.cached_tokens == 0
    assert output.tokens == run(its.one, shared + prompt_of(11, seed=5), SAMPLED).tokens
    its.prefill.pages.index.clear()
    output, _ = its.hand_over(shared + prompt_of(9, seed=6), SAMPLED, "b")  # and now here: pages of others
    assert output.request.cached_tokens == 2 * S
    assert output.tokens == run(its.one, shared + prompt_of(9, seed=6), SAMPLED).tokens


def test_pages_from_elsewhere_are_cached_for_the_next_prompt(two):
    its = two()
    its.hand_over(prompt_of(20), GREEDY)
    output = run(its.decode, prompt_of(20) + [5], GREEDY)
    assert output.request.cached_tokens == 2 * S
    assert output.tokens == run(its.one, prompt_of(20) + [5], GREEDY).tokens


# ---------------------------------------------------------------- the first token
def test_the_first_token_is_drawn_again_where_it_ended_the_answer_or_needs_its_logprobs(two):
    its = two()
    first = run(its.one, prompt_of(9), GREEDY).tokens[0]
    ends = replace(GREEDY, stop_token_ids=(first,))
    output, said = its.hand_over(prompt_of(9), ends, "a")
    assert said["token_ids"] == [] and output.tokens == [] and output.finish_reason == "stop"
    ended = run(its.prefill, prompt_of(9), replace(GREEDY, max_tokens=1), key="c")
    ended.request.finish_reason = "stop"  # as for a stop string that this token completes
    assert its.producer.request_finished(ended.request)["token_ids"] == []
    asks = replace(SAMPLED, logprobs=3)
    output, said = its.hand_over(prompt_of(9), asks, "b")
    alone = run(its.one, prompt_of(9), asks)
    assert said["token_ids"] == [] and output.tokens == alone.tokens
    assert len(output.logprobs) == len(output.tokens) and str(output.logprobs[0]) == str(alone.logprobs[0])


def test_the_one_token_asked_for_is_not_handed_over_twice(two):
    its = two()
    run(its.prefill, prompt_of(9), replace(GREEDY, max_tokens=1), key="a")
    kv = its.consumer.start_load_kv("a", prompt_of(9))
    assert kv.wait()
    with pytest.raises(ValueError, match="1 tokens are made already, of n 1 answers of 1 tokens"):
        its.decode.add(prompt_of(9), replace(GREEDY, max_tokens=1), kv=kv, made=[1])
    output = run(its.decode, prompt_of(9), replace(GREEDY, max_tokens=1), kv=kv)
    assert output.tokens == run(its.one, prompt_of(9), GREEDY).tokens[:1] and output.finish_reason == "length"


# ---------------------------------------------------------------- preemption, failures, aborts
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_preempted_here_it_recomputes_and_asks_nobody(two, steps):
    its, prompt = two(), prompt_of(12)
    first = run(its.prefill, prompt, replace(SAMPLED, max_tokens=1), key="a")
    said, kv = its.producer.request_finished(first.request), its.consumer.start_load_kv("a", prompt)
    assert kv.wait()
    (output,) = its.decode.add(prompt, SAMPLED, kv=kv, made=said["token_ids"])
    for _ in range(steps):
        its.decode.step()
    kv.load = None  # who calls it again, fails
    its.decode.pages.index.clear()  # nothing of it is cached any more
    its.decode.scheduler.preempt(output.request)
    finish(its.decode)
    assert output.tokens == run(its.one, prompt, SAMPLED).tokens and output.error is None


@pytest.mark.parametrize("mode", MODES)
def test_preempted_there_in_the_middle_of_its_prompt(two, mode):
    its, prompt = two(mode, prefix_caching=False), prompt_of(40)
    (first,) = its.prefill.add(prompt, replace(SAMPLED, max_tokens=1), key="a")
    its.prefill.step()
    its.prefill.scheduler.preempt(first.request)
    its.prefill.add(prompt_of(30, seed=8), GREEDY, priority=-1)  # its old pages are somebody else's now
    finish(its.prefill)
    kv = its.consumer.start_load_kv("a", prompt)
    assert kv.wait()
    made = its.producer.request_finished(first.request)["token_ids"]
    assert run(its.decode, prompt, SAMPLED, kv=kv, made=made).tokens == run(its.one, prompt, SAMPLED).tokens
    its.check()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_fails_after_some_layers_have_left(two, at):
    its, prompt = two("layer"), prompt_of(40)
    compute, failures = its.prefill.compute, [at]

    def failing(batch):
        if batch.plan[0][0].computed == 16 and failures:
            layer, save = failures.pop(), its.producer.save_kv_layer

            def watch(i, batch):
                save(i, batch)
                if i == layer:
                    raise RuntimeError("a planted failure")

            its.prefill.cache.watch = watch
            try:
                return compute(batch)
            finally:
                its.prefill.cache.watch = save
        return compute(batch)

    its.prefill.compute = failing
    assert its.hand_over(prompt, SAMPLED)[0].tokens == run(its.one, prompt, SAMPLED).tokens
    assert not failures
    its.check()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_is_aborted_there_lets_nobody_wait(two, mode):
    its = two(mode)
    outputs = its.prefill.add(prompt_of(40), GREEDY, key="a")
    its.prefill.step()
    its.prefill.abort(outputs)
    assert its.producer.request_finished(outputs[0].request) is None
    if mode == "layer":  # something had left already
        start = time.monotonic()
        assert not its.consumer.start_load_kv("a", prompt_of(40)).wait()
        assert time.monotonic() - start < its.consumer.lease / 2
    its.check()


def test_the_next_step_forgets_who_was_aborted(two):
    its = two("layer")
    outputs = its.prefill.add(prompt_of(40), GREEDY, key="a")
    its.prefill.step()
    its.prefill.abort(outputs)
    run(its.prefill, prompt_of(5), GREEDY)
    its.check()


def test_whoever_is_not_asked_for_is_forgotten_after_the_lease(two):
    its = two(lease=0.2)
    run(its.prefill, prompt_of(9), GREEDY, key="a")
    run(its.prefill, prompt_of(5), GREEDY)
    deadline = time.monotonic() + PATIENCE
    while its.producer._sending or len(its.consumer.inbox):
        run(its.prefill, prompt_of(5), GREEDY)
        assert time.monotonic() < deadline
    its.check()


def test_aborted_here_before_during_and_after_the_transfer(two):
    its, prompt = two("layer"), prompt_of(40)
    run(its.prefill, prompt, replace(GREEDY, max_tokens=1), key="before")
    its.consumer.drop("before")
    assert len(its.consumer.inbox) == 0
    waiting = its.consumer.start_load_kv("during", prompt)
    done = []
    thread = threading.Thread(target=lambda: done.append(waiting.wait()))
    thread.start()
    its.consumer.drop("during")
    thread.join(10)
    assert done == [False]
    run(its.prefill, prompt, replace(GREEDY, max_tokens=1), key="during")  # too late
    run(its.prefill, prompt, replace(GREEDY, max_tokens=1), key="after")
    kv = its.consumer.start_load_kv("after", prompt)
    assert kv.wait()
    its.decode.abort(its.decode.add(prompt, GREEDY, kv=kv))  # in the queue
    outputs = its.decode.add(prompt, GREEDY, kv=kv)
    its.decode.step()
    its.decode.abort(outputs)
    its.producer.close()
    assert len(its.consumer.inbox) == 0
    its.producer._sending.clear()
    its.check()


def test_no_room_for_what_was_brought_is_computed_instead(two):
    """8 pages, of which another holds 4 when 40 tokens come with keys and values: it waits, and all end."""
    its = two(num_pages=8)
    other = replace(GREEDY, max_tokens=8)
    (running,) = its.decode.add(prompt_of(24, seed=4), other)
    its.decode.step()
    output, _ = its.hand_over(prompt_of(40), GREEDY)
    assert output.tokens == run(its.one, prompt_of(40), GREEDY).tokens
    assert running.tokens == run(its.one, prompt_of(24, seed=4), other).tokens
    its.check()


# ---------------------------------------------------------------- what is refused
def test_caches_and_models_that_cannot_be_handed_over(model, checkpoints):
    with pytest.raises(ValueError, match="an int4 cache cannot be handed over: the last 63 tokens"):
        Engine(model, kv_cache_dtype="int4", connector=InProcess.pair()[0])
    mistral = load(checkpoints("mistral"))
    if None not in mistral.config.windows:
        with pytest.raises(ValueError, match="this model sees .* tokens back"):
            Engine(mistral, page_size=S, connector=InProcess.pair()[0])
    with pytest.raises(ValueError, match="mode 'half', lease 3 s, .* use mode 'whole' or 'layer'"):
        InProcess.pair(mode="half", lease=3)
    with pytest.raises(ValueError, match="lease 0 s"):
        InProcess.pair(lease=0)
    with pytest.raises(ValueError, match="role 'kv_neither'"):
        InProcess(Inbox(1.0), role="kv_neither")
    with pytest.raises(ValueError, match="gloo is for two engines: role is 'kv_both'"):
        GlooConnector("anywhere")


def test_a_key_belongs_to_whoever_came_first(two):
    its, one_token = two("layer"), replace(SAMPLED, max_tokens=1)
    (first,) = its.prefill.add(prompt_of(40), one_token, key="a")
    its.prefill.step()
    its.prefill.scheduler.preempt(first.request)
    (second,) = its.prefill.add(prompt_of(33, seed=2), one_token, key="a", priority=-1)  # it overtakes
    finish(its.prefill)
    assert its.producer.request_finished(second.request) is None
    made = its.producer.request_finished(first.request)["token_ids"]
    kv = its.consumer.start_load_kv("a", prompt_of(40))
    assert kv.wait()
    output = run(its.decode, prompt_of(40), SAMPLED, kv=kv, made=made)
    assert output.tokens == run(its.one, prompt_of(40), SAMPLED).tokens


OTHERS = {
    "page_size": (dict(page_size=16), "page_size 8 there, page_size 16 here"),
    "kv_cache_dtype": (dict(kv_cache_dtype="int8"), "kv_cache_dtype None there, kv_cache_dtype int8 here"),
}


@pytest.mark.parametrize("what", [*OTHERS, "dtype", "model"])
def test_pages_of_another_engine_are_refused_by_name(model, checkpoints, what, capfd):
    other, (options, message) = model, OTHERS.get(what, ({}, ""))
    if what == "dtype":
        other, message = (
            load(checkpoints("llama-3"), torch.bfloat16),
            "dtype float32 there, dtype bfloat16 here",
        )
    if what == "model":
        other, message = load(checkpoints("llama-3")), "model .* there, model .* here"
        with torch.no_grad():
            other.embed_tokens.weight.mul_(1.5)
    producer, consumer = InProcess.pair(lease=20)
    prefill = Engine(model, connector=producer, **OPTIONS)
    decode = Engine(other, connector=consumer, **OPTIONS | options)
    run(prefill, prompt_of(9), GREEDY, key="a")
    shape = Shape.of(prefill)
    with pytest.raises(ValueError, match=message):
        consumer.shape.check(vars(shape))
    assert not consumer.start_load_kv("a", prompt_of(9)).wait()
    page = decode.cache.nbytes // decode.cache.num_pages
    assert f"{page:,} bytes" in capfd.readouterr().err
    producer.close()


def test_keys_and_values_of_another_prompt_are_refused(two, capfd):
    its = two()
    run(its.prefill, prompt_of(9), GREEDY, key="a")
    assert not its.consumer.start_load_kv("a", prompt_of(9, seed=2)).wait()
    assert "of another prompt" in capfd.readouterr().err


def test_half_of_it_is_not_taken(two):
    its = two("layer")
    run(its.prefill, prompt_of(40), GREEDY, key="a")
    kv = its.consumer.start_load_kv("a", prompt_of(40))
    with pytest.raises(ValueError, match="of layer 0, 0 pages have arrived, and the prompt has 5"):
        its.decode.add(prompt_of(40), GREEDY, kv=kv)
    assert kv.wait()
    lost = kv.parts.pop(4)  # layer 1 of the second chunk
    with pytest.raises(ValueError, match="of layer 1, 3 pages have arrived, and the prompt has 5"):
        kv.check(its.decode.cache)
    kv.parts.append(replace(lost, tensors=[[x[:, :4] for x in lost.tensors[0]]]))
    with pytest.raises(ValueError, match="layer 1 came in pages of another shape"):
        kv.check(its.decode.cache)


@pytest.mark.parametrize("key", ["", "../a", "a/b", "a" * 65, "a.b", 7, None, "a\n"])
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match="transfer_id is .* it must be 1 to 64 letters"):
        checked_key(key)


# ---------------------------------------------------------------- messages
def part_of(key="a", number=0, **fields):
    usual = dict(layer=0, first_page=0, end=1, num_tokens=1, prompt="", shape={})
    return Part(key, number, **usual | fields)


def test_a_message_comes_back_as_it_was():
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        x = torch.arange(24).view(2, 3, 4).to(dtype)
        part = part_of(
            layer=2, shape={"layers": 3}, tensors=[[x, x.flip(0)], [x[:1].clone(), x.clone()]], prompt="é"
        )
        back = Part.from_bytes(part.to_bytes())
        assert replace(back, tensors=[]) == replace(part, tensors=[])
        assert all(
            torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
            for its, theirs in zip(back.tensors, part.tensors, strict=True)
            for a, b in zip(its, theirs, strict=True)
        )
    assert Part.from_bytes(part_of(failed="why").to_bytes()).failed == "why"


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_what_is_no_message(cut):
    data = part_of(tensors=[[torch.zeros(2, 3)]]).to_bytes()
    with pytest.raises(ValueError, match="bytes that are no message"):
        Part.from_bytes(data[:cut])


def test_messages_twice_late_or_never():
    now = [0.0]
    inbox = Inbox(lease=10, clock=lambda: now[0])
    inbox.put(part_of(number=0))
    inbox.put(part_of(number=0))  # twice is once
    assert len(inbox) == 1
    assert inbox.take("a", 0, 1).number == 0 and inbox.take("a", 1, 0.01) is None
    inbox.put(part_of(number=0))  # again, and already taken: it disturbs nobody
    inbox.drop("a")
    inbox.put(part_of(number=1))  # late
    assert len(inbox) == 0 and inbox.take("a", 1, 100) is None  # at once
    inbox.put(part_of("b"))
    now[0] = 9
    inbox.put(part_of("b", 1))  # news: the lease begins anew
    now[0] = 18
    assert len(inbox) == 2
    now[0] = 19.5
    assert len(inbox) == 0
    assert not inbox._boxes and not inbox._news and not inbox._dropped  # nothing is remembered for ever


def test_a_link_that_breaks_wakes_whoever_waits():
    for wake in (lambda inbox: inbox.fail(ConnectionError("gone")), lambda inbox: inbox.drop("a")):
        inbox, answers = Inbox(lease=100), []
        take = lambda inbox=inbox, answers=answers: answers.append(inbox.take("a", 0, 100))
        threads = [threading.Thread(target=take, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        wake(inbox)
        deadline = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert answers == [None] * 3


# ---------------------------------------------------------------- the link
def test_the_link_s_arithmetic():
    assert Link(1e6, 0.01).predicted_seconds(2_000_000, 3) == pytest.approx(2.03)
    assert Link().predicted_seconds(10**12, 10**6) == 0
    for wrong in (dict(bandwidth=0), dict(bandwidth=-1.0), dict(latency=-0.1), dict(latency=float("inf"))):
        with pytest.raises(ValueError, match="nothing would ever arrive"):
            Link(**wrong)


@pytest.mark.parametrize("link", [Link(latency=0.1), Link(bandwidth=1e4), Link(2e4, 0.05)])
def test_messages_come_in_order_and_never_sooner_than_the_link_allows(link):
    came = []
    sender = Sender(lambda message: came.append((message, time.monotonic())), link)
    start = time.monotonic()
    for i in range(8):
        assert sender.send(i, 1000)
    assert time.monotonic() - start < link.predicted_seconds(8000, 8)  # send() itself does not wait
    deadline = start + 30
    while len(came) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [message for message, _ in came] == [*range(8)] and sender.sent_bytes == 8000
    for i, (_, at) in enumerate(came, 1):
        assert at - start >= link.predicted_seconds(1000 * i, i) - 1e-4
    sender.close()


def test_half_the_bandwidth_takes_twice_as_long():
    def seconds(bandwidth):
        done = threading.Event()
        sender = Sender(lambda message: done.set(), Link(bandwidth))
        start = time.monotonic()
        sender.send("x", 100_000)
        assert done.wait(30)
        sender.close()
        return time.monotonic() - start

    assert min(seconds(1e6) for _ in range(3)) < min(seconds(0.5e6) for _ in range(3))


def test_one_message_that_fails_does_not_stop_the_next(two):
    came, sender = [], None

    def put(message):
        if message == "bad":
            raise OSError("no space left")
        came.append(message)

    sender = Sender(put, Link())
    sender.send("bad", 1), sender.send("good", 1)
    deadline = time.monotonic() + PATIENCE
    while not came:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert came == ["good"] and str(sender.error) == "no space left"
    sender.close()
    assert not sender.send("late", 1)


def test_a_link_that_falls_behind_refuses_rather_than_fill_the_memory(two, capfd):
    its = two("layer", link=Link(bandwidth=1000.0))
    its.producer.sender = Sender(its.producer._put, its.producer.link, most=2 * S * 3 * 2 * 2 * 16 * 4)
    first = run(its.prefill, prompt_of(40), GREEDY, key="a")
    assert its.producer.request_finished(first.request) is None  # so nobody is sent to wait for it
    assert "a is not handed over" in capfd.readouterr().err
    its.check()


# ---------------------------------------------------------------- the other transports
class Files:
    def __init__(self, folder):
        self.folder = folder

    def ends(self, **options):
        return [FileConnector(self.folder / "kv", **options) for _ in range(2)]


class Gloo(Files):
    made: list[GlooConnector] = []  # of all tests

    def ends(self, **options):
        where = str(self.folder / "meet")
        ends = [GlooConnector(where, patience=60, role=role, **options) for role in ROLES[:2]]
        self.made.extend(ends)
        return ends


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", [Files, Gloo])
def test_other_transports_carry_the_same(model, tmp_path, transport, mode):
    its = Two(model, transport(tmp_path).ends(mode=mode, lease=20.0))
    try:
        for n in LENGTHS:
            output, _ = its.hand_over(prompt_of(n), SAMPLED, str(n))
            assert output.tokens == run(its.one, prompt_of(n), SAMPLED).tokens
        its.check()
    finally:
        its.close()
    assert transport is Gloo or not list((tmp_path / "kv").iterdir())


def test_a_file_that_is_not_whole_is_not_seen_and_a_broken_one_is_no_use(model, tmp_path, capfd):
    its = Two(model, Files(tmp_path).ends(lease=1.0))
    run(its.prefill, prompt_of(9), GREEDY, key="a")
    file, deadline = tmp_path / "kv" / "a.000000.safetensors", time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline
    data = file.read_bytes()
    file.unlink()
    file.with_name(f".{file.name}.1").write_bytes(data)  # a writer that died before it renamed
    start = time.monotonic()
    assert not its.consumer.start_load_kv("a", prompt_of(9)).wait()
    assert time.monotonic() - start >= its.consumer.lease
    (tmp_path / "kv" / "b.000000.safetensors").write_bytes(data[:-7])
    assert not its.consumer.start_load_kv("b", prompt_of(9)).wait()
    assert "no message of keys and values" in capfd.readouterr().err
    assert not list((tmp_path / "kv").iterdir())
    its.close()


def test_files_nobody_fetches_are_deleted_after_the_lease(model, tmp_path):
    its = Two(model, Files(tmp_path).ends(lease=0.3))
    deadline = time.monotonic() + PATIENCE
    run(its.prefill, prompt_of(9), GREEDY, key="a")
    while its.producer.sender.sent == 0:
        assert time.monotonic() < deadline
    its.consumer.drop("b")
    (tmp_path / "kv" / "b.000000.safetensors").write_bytes(b"late")  # for somebody who gave up
    while list((tmp_path / "kv").iterdir()):  # whoever looks, tidies up
        assert its.consumer.take(f"c{time.monotonic_ns()}", 0, 0.1) is None
        assert time.monotonic() < deadline
    its.close()


def test_an_idle_link_lives_and_one_whose_other_side_is_gone_is_broken(model, tmp_path, capfd):
    its = Two(model, Gloo(tmp_path).ends(lease=1.0))
    assert not its.consumer.start_load_kv("never", prompt_of(9)).wait()  # a whole lease without a message
    assert its.consumer.error is None
    output, _ = its.hand_over(prompt_of(9), GREEDY)
    assert output.tokens == run(its.one, prompt_of(9), GREEDY).tokens
    its.producer.close()
    start = time.monotonic()
    assert not its.consumer.start_load_kv("b", prompt_of(9)).wait()
    deadline = start + 20
    while its.consumer.error is None:
        assert time.monotonic() < deadline
    assert not its.consumer.start_load_kv("c", prompt_of(9)).wait()
    assert "the other side has closed" in capfd.readouterr().err
    its.close()


def test_a_broken_link_is_not_sent_to(model, tmp_path, capfd):
    its = Two(model, Gloo(tmp_path).ends(lease=20.0, mode="layer"))
    its.hand_over(prompt_of(9), GREEDY)
    its.producer._broken(ConnectionError("the other side is gone"))
    first = run(its.prefill, prompt_of(40), GREEDY, key="b")
    assert its.producer.request_finished(first.request) is None  # so nobody is told to wait for it
    its.producer.close()
    said = capfd.readouterr().err
    assert said.count("the other side is gone") == 1 and "handed over" not in said
    its.check()
    its.close()


def test_nobody_to_meet(model, tmp_path, capfd):
    alone = GlooConnector(str(tmp_path / "meet"), patience=0.5, lease=6.0, role="kv_consumer")
    engine, start = Engine(model, connector=alone, **OPTIONS), time.monotonic()
    assert not alone.start_load_kv("a", prompt_of(9)).wait()
    assert time.monotonic() - start < PATIENCE and alone.error is not None
    assert run(engine, prompt_of(9), GREEDY).finish_reason == "length"
    assert "no keys and values from or to the other engine" in capfd.readouterr().err
    alone.close()


@pytest.mark.parametrize("lease", [1.0, 40.0])
@pytest.mark.parametrize("first", [0, 1], ids=ROLES[:2])
def test_who_closes_leaves_no_thread_and_the_other_hears_it(model, tmp_path, first, lease):
    its = Two(model, Gloo(tmp_path).ends(lease=lease))
    ends = [its.producer, its.consumer]
    try:
        its.hand_over(prompt_of(9), GREEDY)
        ends[first].close()
        assert not ends[first]._thread.is_alive()
        deadline = time.monotonic() + PATIENCE
        while ends[1 - first].error is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        start = time.monotonic()
        its.close()
    assert not ends[1 - first]._thread.is_alive() and time.monotonic() - start < 5


def test_who_waits_for_the_other_can_be_closed(model, tmp_path):
    alone = GlooConnector(str(tmp_path / "meet"), patience=12, lease=20.0, role="kv_consumer")
    Engine(model, connector=alone, **OPTIONS)
    assert alone._thread.is_alive()
    alone.close()
    assert not alone._thread.is_alive() and alone.error is None


def test_what_the_command_line_describes(tmp_path):
    def made(*words):
        parser = ArgumentParser()
        add_connector_arguments(parser)
        return connector_of(parser.parse_args(words))

    assert made() is None
    its = made("--kv-role", "kv_producer", "--kv-path", str(tmp_path / "kv"), "--kv-mode", "layer",
               "--kv-bandwidth", "1e6", "--kv-latency", "0.5", "--kv-lease", "7")  # fmt: skip
    assert isinstance(its, FileConnector) and its.role == "kv_producer"
    assert (its.mode, its.link, its.lease) == ("layer", Link(1e6, 0.5), 7.0)
    other = made("--kv-role", "kv_consumer", "--kv-path", "tcp://127.0.0.1:1", "--kv-connector", "gloo")
    assert isinstance(other, GlooConnector) and other.link == Link()
    with pytest.raises(ValueError, match="--kv-role kv_consumer needs --kv-path"):
        made("--kv-role", "kv_consumer")
    with pytest.raises(ValueError, match="nothing would ever arrive"):
        made("--kv-role", "kv_consumer", "--kv-path", "x", "--kv-bandwidth", "0")


def test_a_transport_is_three_methods():
    assert KVConnector.__abstractmethods__ == {"put", "take"}


# ---------------------------------------------------------------- with everything else
def test_drafts_behind_a_prompt_from_elsewhere(model):
    its = Two(model, InProcess.pair(mode="layer", lease=20.0))
    its.decode = Engine(model, connector=its.consumer, drafter="ngram", **OPTIONS)
    prompt = [5, 6, 7, 8] * 6
    params = replace(GREEDY, max_tokens=40)
    output, _ = its.hand_over(prompt, params)
    assert output.tokens == run(its.one, prompt, params).tokens
    assert any(row.drafted for record in its.decode.log for row in record.rows)
    its.check()
    its.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_real_model_says_the_same(smollm, mode):
    model = load(smollm)
    sizes = dict(num_pages=40, page_size=16, token_budget=64, max_running=4)
    its = Two(model, InProcess.pair(mode=mode, lease=60.0), **sizes)
    prompt = [(7919 * i + 5) % model.config.vocab_size for i in range(150)]
    for i, params in enumerate((GREEDY, replace(SAMPLED, temperature=0.8))):
        output, _ = its.hand_over(prompt, params, str(i))
        assert output.tokens == run(its.one, prompt, params).tokens
    its.check()
    its.close()
