"""lab/paging: the arithmetic by hand, the walk against the definition, days and prefixes against the pool itself."""

import random
from dataclasses import replace

import pytest
import torch

from minserve.config import SHAPES
from minserve.engine import Engine
from minserve.kernels.paged_attention import paged_attention_reference
from minserve.lab import paging
from minserve.model import Model
from minserve.pages import PagePool, ReservingPool


@pytest.fixture(scope="module")
def tiny_model():
    sizes = dict(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8)
    return Model.random(replace(SHAPES["smollm2-135m"], **sizes, vocab_size=50, context=64, windows=()))


def test_arithmetic_by_hand():
    assert [paging.slot_of([0, 1, 5], j, 4) for j in (0, 3, 7, 9)] == [0, 3, 7, 21]
    assert paging.waste([6], 4) == 0.25 and paging.waste([8, 4], 4) == 0
    assert paging.waste([5, 5, 5], 4) == pytest.approx(3 * 3 / 24)


def test_lengths_have_the_median_and_mean_they_were_asked_for():
    prompts, answers = paging.chats(20_000, most=10**6)
    assert abs(sorted(prompts)[10_000] - 1020) < 30 and abs(sum(prompts) / 20_000 - 1155) < 40
    assert abs(sorted(answers)[10_000] - 129) < 5 and abs(sum(answers) / 20_000 - 211) < 10
    assert min(prompts) >= 16 and max(paging.chats(5000)[1]) == 1024


@pytest.mark.parametrize("length", [1, 4, 5, 13, 16])
def test_walk_equals_the_definition_and_reads_nothing_else(length):
    torch.manual_seed(length)
    k, v = torch.full((2, 9, 4, 8), torch.nan)
    table = random.Random(length).sample(range(9), 4)
    for j in range(length):
        k[table[j // 4], j % 4], v[table[j // 4], j % 4] = torch.randn(2, 8)
    q, starts = torch.randn(3, 8), torch.tensor([0, 1])
    expected = paged_attention_reference(
        q[None], k[:, :, None], v[:, :, None], torch.tensor([table]), starts, torch.tensor([length])
    )
    stale = table[: -(-length // 4)] + [-1, 99]
    assert torch.allclose(paging.walk(q, k, v, stale, length), expected[0], atol=1e-5)


def test_a_day_by_hand():
    """Two requests of 4 + 4 tokens: pages of 4 hold both at once, a reservation one after the other."""
    both = paging.day(PagePool(4, 4, prefix_caching=False), [4, 4], [4, 4], limit=5)
    one = paging.day(ReservingPool(3, 4, prefix_caching=False), [4, 4], [4, 4], limit=5)
    assert (both.steps, both.most, both.preemptions) == (4, 2, 0)
    assert (one.steps, one.most, one.running) == (8, 1, 1.0)
    assert one.waste == pytest.approx(1 - (4 + 5 + 6 + 7) / 4 / 8)  # only while the second one waits
    longer = paging.day(ReservingPool(3, 4, prefix_caching=False), [4, 1], [4, 4], limit=5)
    assert longer.waste == one.waste
    assert str(one) == "1.0 at once, 31.2% empty, 8 steps, 0 preemptions"


def test_pages_win_back_what_a_reservation_wastes():
    prompts, answers = paging.chats(300)
    naive, paged = (
        paging.day(kind(2048, 16, prefix_caching=False), prompts, answers, 1024)
        for kind in (ReservingPool, PagePool)
    )
    assert paged.running > 1.4 * naive.running and paged.waste < 0.04 < 0.3 < naive.waste
    assert naive.preemptions == 0


def test_fill_stops_where_the_pool_is_full():
    pool = ReservingPool(12, 4, prefix_caching=False)
    inside = paging.fill(pool, [6, 3, 7, 4, 5], most=16)
    assert [len(r.pages) for r in inside] == [4, 4, 4] and pool.available == 0
    pool.check(inside)


def test_serve_makes_the_same_steps_as_a_day(tiny_model):
    prompts, answers = [5, 9, 3, 12, 7], [3, 6, 2, 5, 4]
    for kind in (ReservingPool, PagePool):
        engine = Engine(tiny_model, num_pages=8, page_size=4, pool=kind, prefix_caching=False)
        assert paging.serve(engine, prompts, answers, limit=16) > 0
        alone = paging.day(kind(8, 4, prefix_caching=False), prompts, answers, 16, 512, 64)
        assert len(engine.log) == alone.steps and engine.pages.available == 8


def test_decode_batch_has_one_token_per_row_in_pages_of_its_own():
    batch = paging.decode_batch([5, 33, 16], pages=16)
    assert batch.num_singles == 3 and batch.host_lengths == [5, 33, 16]
    assert len(set(batch.slots.tolist())) == 3


# ---------------------------------------------------------------- prefixes
def test_chain_keys_are_the_pools():
    pool, tokens = PagePool(8, 4), list(range(14))
    paging.arrive(pool, 0, tokens)
    paging.arrive(pool, 1, tokens[:9], salt=b"eve")
    keys = paging.chain_keys(tokens, 4) + paging.chain_keys(tokens[:9], 4, b"/eve")
    assert len(keys) == 5 and set(keys) == set(pool.index)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_shared_pages_is_what_the_pool_finds(page_size):
    for seed in range(200):
        rng = random.Random(seed)
        same = [rng.randrange(3) for _ in range(rng.randrange(20))]
        one, two = (same + rng.choices(range(3), k=rng.randrange(1, 12)) for _ in range(2))
        pool = PagePool(64, page_size)
        paging.arrive(pool, 0, one)
        found = paging.arrive(pool, 1, two).cached_tokens
        assert found == page_size * paging.shared_pages(two, one, page_size), (one, two)


def test_hit_rate_of_least_recently_used():
    talks = [[talk] * 9 for talk in range(3)]  # 2 full pages of 4, and one token
    assert paging.hit_rate(PagePool(7, 4), talks * 4) == pytest.approx(9 * 8 / (12 * 9))
    assert paging.hit_rate(PagePool(4, 4), talks * 4) == 0
    assert paging.hit_rate(PagePool(4, 4), talks[:1] * 4) == pytest.approx(3 * 8 / (4 * 9))


def test_arrive_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="9 tokens do not fit: 2 pages of 4"):
        paging.arrive(PagePool(2, 4), 0, range(9))


def test_first_token_says_what_was_found(tiny_model):
    engine, prompt = Engine(tiny_model, num_pages=16, page_size=4), list(range(1, 15))
    assert [paging.first_token(engine, prompt)[1] for _ in range(2)] == [0, 12]
    assert paging.first_token(engine, prompt, b"eve")[1] == 0
