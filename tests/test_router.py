"""The router over servers that behave, refuse, break off or hang: what its client sees, and what it counts."""

import asyncio
import gc
import json
import logging

import fleet_world
import httpx2
import pytest
from fleet_world import (
    dies_after_its_headers,
    dies_at_once,
    dies_in_the_middle_of_a_whole_answer,
    event,
    fine,
    hangs,
    in_loop,
    pours,
    refuses,
    routed,
    streams,
    until,
)
from wrong_versions import wrong_version

from minserve.cluster import merged, pool, router
from minserve.cluster.policies import Replica
from minserve.cluster.router import prompt_of

WAIT = 10.0  # seconds, for what has to happen soon
CHAT = dict(model="tiny", messages=[dict(role="user", content="Hi")])


def ports(world):
    return [upstream.port for upstream in world.upstreams]


# ---------------------------------------------------------------- nothing is changed on the way
@in_loop
async def test_requests_and_answers_pass_unchanged(module=router):
    async with routed(fine, module=module) as world:
        content = json.dumps(CHAT).encode()
        answer = await world.client.post(
            "/v1/chat/completions?x=1%20y",
            content=content,
            headers={"Authorization": "Bearer s", "X-Own": "é".encode()},
        )
        [asked] = world.upstreams[0].asked
        assert (asked.method, asked.path, asked.body) == ("POST", "/v1/chat/completions?x=1%20y", content)
        assert asked.headers["authorization"] == "Bearer s" and asked.headers["host"].endswith(
            str(ports(world)[0])
        )
        assert answer.status_code == 200 and answer.json()["said"] == content.decode()
        assert (
            answer.headers["x-request-id"] == "cmpl-1"
            and answer.headers["x-replica"] == world.upstreams[0].url
        )
        assert (await world.client.get("/v1/models")).json()["method"] == "GET"
        assert (await world.client.delete("/v1/a%2Fb")).json()["path"] == "/v1/a%2Fb"


@in_loop
async def test_a_stream_passes_piece_by_piece(module=router):
    """The first events arrive while the replica waits before the third."""
    async with routed(streams("a", "b", "c"), module=module) as world:
        async with world.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            pieces = answer.aiter_raw()
            got = b""
            async with asyncio.timeout(WAIT):
                while got != event("a") + event("b"):
                    got += await anext(pieces)
            assert world.pool.ongoing == 1
            world.upstreams[0].go.set()
            async for piece in pieces:
                got += piece
        assert got == event("a") + event("b") + event("c") + b"data: [DONE]\n\n"


@in_loop
async def test_an_answer_of_the_server_is_an_answer_even_if_it_is_an_error(module=router):
    """Only 429 and 503 go to another: 400 and 500 are what that request deserves."""
    for status in (400, 401, 404, 500):
        async with routed(refuses(status), fine, module=module) as world:
            answer = await world.client.post("/v1/completions", json=CHAT)
            assert answer.status_code == status and answer.json()["error"]["code"] == str(status)
            assert len(world.upstreams[1].asked) == 0


# ---------------------------------------------------------------- another replica
@in_loop
async def test_full_or_leaving_another_takes_over(module=router):
    for status in (429, 503):
        async with routed(refuses(status), fine, module=module) as world:
            answer = await world.client.post("/v1/completions", json=CHAT)
            assert answer.status_code == 200 and answer.json()["port"] == ports(world)[1]
            assert world.router.retries == 1


@in_loop
async def test_all_full_is_429_with_retry_after_and_each_was_asked_once(module=router):
    async with routed(*[refuses(429)] * 3, module=module) as world:
        answer = await world.client.post("/v1/completions", json=CHAT)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3" and answer.json()["error"]
        assert [len(upstream.asked) for upstream in world.upstreams] == [1, 1, 1]


@in_loop
async def test_no_connection_another_takes_over(module=router):
    async with routed(fine, fine, fine, module=module) as world:
        world.upstreams[0].kill()
        world.upstreams[1].kill()
        for _ in range(4):
            answer = await world.client.post("/v1/completions", json=CHAT)
            assert answer.status_code == 200 and answer.json()["port"] == ports(world)[2]


@pytest.mark.parametrize("dies", [dies_at_once, dies_after_its_headers, dies_in_the_middle_of_a_whole_answer])
@in_loop
async def test_lost_before_the_first_byte_another_takes_over(dies, module=router):
    async with routed(dies, streams("a", "b"), module=module) as world:
        answer = await world.client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert [len(upstream.asked) for upstream in world.upstreams] == [1, 1]


@in_loop
async def test_a_request_that_two_replicas_were_lost_with_gets_no_third(module=router):
    async with routed(*[dies_at_once] * 4, module=module) as world:
        answer = await world.client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 502 and answer.json()["error"]["type"] == "server_error"
        assert sum(len(upstream.asked) for upstream in world.upstreams) == 2


@in_loop
async def test_broken_in_the_middle_it_ends_with_an_error_and_nobody_else_is_asked(module=router):
    async with routed(streams("a", "b", "c", breaks=True), fine, module=module) as world:
        world.upstreams[0].go.set()
        answer = await world.client.post("/v1/chat/completions", json=CHAT)
        *whole, last = [e for e in answer.text.split("\n\n") if e]
        assert [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in whole] == ["a", "b", "c"]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "broke off" in error["message"] and "[DONE]" not in answer.text
        assert len(world.upstreams[1].asked) == 0


# ---------------------------------------------------------------- clients that leave
@in_loop
async def test_a_client_that_leaves_its_stream_closes_it_behind_the_router(module=router):
    async with routed(streams("a", "b", "c"), module=module) as world:
        async with world.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            await anext(answer.aiter_raw())
        await asyncio.wait_for(world.upstreams[0].closed.wait(), WAIT)
        await until(lambda: world.pool.ongoing == 0, "counted down")


@in_loop
async def test_a_client_that_leaves_before_any_answer_does_so_too(module=router):
    async with routed(hangs, module=module) as world:
        asking = asyncio.create_task(world.client.post("/v1/completions", json=CHAT))
        await until(lambda: world.upstreams[0].asked, "it was asked")
        assert world.pool.ongoing == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(world.upstreams[0].closed.wait(), WAIT)
        await until(lambda: world.pool.ongoing == 0, "counted down")


async def raw(world, content: bytes):
    """A client that has sent this and reads nothing yet."""
    reader, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"), limit=1024)
    writer.write(content)
    await writer.drain()
    return reader, writer


@in_loop
async def test_a_client_that_takes_nothing_is_dropped(module=router):
    """It stands for a while, behind it the replica, for nothing is stored; then both are let go."""
    async with routed(pours, module=module, stall_seconds=0.3) as world:
        _, writer = await raw(
            world, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        )
        await asyncio.wait_for(world.upstreams[0].closed.wait(), WAIT)
        await until(lambda: world.pool.ongoing == 0, "counted down")
        writer.close()


@in_loop
async def test_a_body_that_does_not_come_is_408(module=router):
    async with routed(fine, module=module, body_seconds=0.2) as world:
        reader, writer = await raw(
            world, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT)
        assert (
            head.startswith(b"HTTP/1.1 408")
            and b"connection: close" in head
            and world.upstreams[0].asked == []
        )
        writer.close()


@in_loop
async def test_outstanding_is_exact_on_every_way_out(module=router):
    """Streams read and left, refusals, lost replicas, all at once; then everything is at zero."""
    behaviours = (streams("a", "b"), refuses(429), streams("a", "b", "c"), fine, dies_after_its_headers)
    async with routed(*behaviours, module=module, fall=10**6) as world:

        async def ask(i):
            async with world.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
                async for _ in answer.aiter_raw():
                    if i % 3 == 0:
                        return

        asking = [asyncio.create_task(ask(i)) for i in range(40)]
        await until(lambda: len(world.upstreams[2].asked) >= 3, "some are held")
        held = world.pool.replicas[world.upstreams[2].url]
        assert held.ongoing >= 1
        world.upstreams[2].go.set()
        await asyncio.gather(*asking)
        await until(lambda: world.pool.ongoing == 0, "all ended")
        assert {replica.ongoing for replica in world.pool.replicas.values()} == {0}
        assert sum(world.pool.served.values()) == sum(len(upstream.asked) for upstream in world.upstreams)


# ---------------------------------------------------------------- health
def test_health_has_hysteresis(module=pool):
    vital, replica, seen = module.Vital(fall=3, rise=2), Replica("x"), []
    for well in (0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0):
        vital.saw(bool(well), replica)
        seen.append(int(replica.healthy))
    assert seen == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0]


@in_loop
async def test_the_ill_get_nothing_until_they_are_well(module=router):
    async with routed(fine, fine, module=module, interval=0.01) as world:
        ill = world.upstreams[0]
        replica = world.pool.replicas[ill.url]
        ill.well = False
        await until(lambda: not replica.healthy, "found ill")
        for _ in range(4):
            assert (await world.client.get("/v1/models")).json()["port"] == ports(world)[1]
        assert ill.asked == [] and (await world.client.get("/health")).status_code == 200
        ill.well = True
        await until(lambda: replica.healthy, "found well")
        assert {(await world.client.get("/v1/models")).json()["port"] for _ in range(4)} == set(ports(world))


@in_loop
async def test_nobody_there_is_503_with_retry_after(module=router):
    async with routed(fine, module=module, interval=0.01) as world:
        world.upstreams[0].well = False
        await until(lambda: not next(iter(world.pool.replicas.values())).healthy, "found ill")
        for answer in (
            await world.client.post("/v1/completions", json=CHAT),
            await world.client.get("/health"),
        ):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert (
                error["type"] == "server_error"
                and error["code"] == "no_replica"
                and "1 of them ill" in error["message"]
            )


@in_loop
async def test_refused_connections_make_ill_without_a_check(module=router):
    async with routed(fine, fine, module=module, fall=2) as world:
        await until(lambda: world.pool._vitals[world.upstreams[0].url].passed, "the first check is over")
        world.upstreams[0].kill()
        for _ in range(6):
            assert (await world.client.get("/v1/models")).status_code == 200
        assert not world.pool.replicas[world.upstreams[0].url].healthy and world.router.retries == 2


@in_loop
async def test_a_prefix_stays_together_until_its_replica_is_ill(module=router):
    chat = lambda i: dict(
        messages=[dict(role="system", content="Be brief. " * 20), dict(role="user", content=str(i))]
    )
    async with routed(fine, fine, fine, module=module, policy="prefix_aware", interval=0.01) as world:
        homes = {
            (await world.client.post("/v1/chat/completions", json=chat(i))).json()["port"] for i in range(5)
        }
        assert len(homes) == 1
        home = next(u for u in world.upstreams if u.port in homes)
        home.well = False
        await until(lambda: not world.pool.replicas[home.url].healthy, "found ill")
        assert home.url not in world.router.policy._known
        assert (await world.client.post("/v1/chat/completions", json=chat(9))).json()["port"] not in homes


# ---------------------------------------------------------------- leaving
@in_loop
async def test_draining_one_finishes_what_it_has_and_takes_nothing_new(module=router):
    async with routed(hangs, fine, module=module) as world:
        first = world.upstreams[0]
        asking = asyncio.create_task(world.client.post("/v1/completions", json=CHAT))
        await until(lambda: first.asked, "it was asked")
        assert not await world.pool.drain(first.url, seconds=0.05)  # not in time
        leaving = asyncio.create_task(world.pool.drain(first.url, seconds=20))
        for _ in range(3):
            assert (await world.client.get("/v1/models")).json()["port"] == ports(world)[1]
        assert not leaving.done() and len(first.asked) == 1
        first.go.set()
        assert await leaving and (await asking).status_code == 200
        world.pool.remove(first.url)
        assert list(world.pool.replicas) == [world.upstreams[1].url]


@in_loop
async def test_draining_all_refuses_what_is_new(module=router):
    async with routed(hangs, fine, module=module) as world:
        held, late = world.upstreams
        world.pool.remove(late.url)
        asking = asyncio.create_task(world.client.post("/v1/completions", json=CHAT))
        await until(lambda: held.asked, "it was asked")
        leaving = asyncio.create_task(world.router.drain(20))
        await until(lambda: world.router.draining, "it drains")
        world.pool.add(late.url)  # also if somebody comes too late
        refused = await world.client.post("/v1/completions", json=CHAT)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        held.go.set()
        assert await leaving and (await asking).status_code == 200


# ---------------------------------------------------------------- what is its own
@in_loop
async def test_a_body_too_long_is_413(module=router):
    async with routed(fine, module=module, max_body=100) as world:
        answer = await world.client.post("/v1/completions", content=b"x" * 101)
        assert answer.status_code == 413 and "100 bytes" in answer.json()["error"]["message"]
        assert (await world.client.post("/v1/completions", content=b"x" * 100)).status_code == 200


@in_loop
async def test_what_cannot_be_asked_is_told_in_openais_shape(module=router):
    async with routed(fine, module=module) as world:
        for status, kind, first in (
            (404, "not_found_error", b"OPTIONS *"),
            (
                400,
                "invalid_request_error",
                b"GET /" + b"a" * 65_600,
            ),  # longer than the router's own client can say
        ):
            reader, writer = await raw(world, first + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            head, _, body = (await asyncio.wait_for(reader.read(-1), WAIT)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d" % status), first[:20]
            assert json.loads(body)["error"]["type"] == kind
            writer.close()
        assert world.upstreams[0].asked == [] and world.pool.replicas[world.upstreams[0].url].healthy


@in_loop
async def test_load_and_stats_are_those_of_all(module=router):
    async with routed(fine, fine, fine, module=module) as world:
        assert (await world.client.get("/load")).json() == dict(running=6, waiting=3)
        world.upstreams[2].kill()
        stats = (await world.client.get("/stats")).json()
        assert (stats["model"], stats["running"], stats["max_running"], stats["pages"]["total"]) == (
            "tiny",
            4,
            8,
            20,
        )
        assert stats["requests"] == dict(finished=10, failed=2)
        assert [r["url"] for r in stats["replicas"]] == [upstream.url for upstream in world.upstreams]
        assert [r["stats"] is None for r in stats["replicas"]] == [False, False, True]


@in_loop
async def test_metrics_have_a_label_for_the_replica_and_each_family_once(module=router):
    async with routed(fine, fine, module=module) as world:
        text = (await world.client.get("/metrics")).text
        assert text.count("# TYPE minserve:num_requests_running gauge") == 1
        for port in ports(world):
            name = f'replica="127.0.0.1:{port}"'
            assert f'minserve:num_requests_running{{{name},model_name="tiny"}} 2.0\n' in text
            assert f"minserve:up{{{name}}} 1.0\n" in text
            assert f"minserve:router_available{{{name}}} 1\n" in text
        parser = pytest.importorskip("prometheus_client.parser")
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        assert len(families["minserve:num_requests_running"].samples) == 2


def test_families_stay_together_when_servers_know_different_ones(module=merged):
    one, two = (
        "# HELP a A\n# TYPE a counter\na 1\n",
        "# HELP b B\n# TYPE b gauge\nb 3\n# HELP a A\n# TYPE a counter\na 2\n",
    )
    assert module.metrics({"http://x:1": one, "http://x:2": two}).splitlines() == [
        "# HELP a A", "# TYPE a counter", 'a{replica="x:1"} 1', 'a{replica="x:2"} 2',
        "# HELP b B", "# TYPE b gauge", 'b{replica="x:2"} 3',
    ]  # fmt: skip
    assert module.metrics({"http://x:1": 'h_bucket{le="+Inf",m="a b} c"} 3.0 17\n'}) == (
        'h_bucket{replica="x:1",le="+Inf",m="a b} c"} 3.0 17\n'
    )


def test_what_a_prefix_aware_policy_compares():
    said = lambda **body: prompt_of(json.dumps(body).encode())
    system = dict(role="system", content="Be brief.")
    one, two = (said(messages=[system, dict(role="user", content=text)]) for text in ("Hi", "Ho"))
    assert one.startswith("system\nBe brief.\nuser\nH") and one[:-2] == two[:-2]
    parts = [dict(type="text", text="Be"), dict(type="text", text="brief.")]
    assert said(messages=[dict(role="user", content=parts)]) == "user\nBe\nbrief.\n"
    assert said(messages=[dict(role="assistant", content=None)]) == "assistant\n\n"
    assert said(prompt="abc") == "abc" and said(prompt=[1, 2]) == [1, 2]
    assert said(prompt=["abc", "d"]) == "abc" and said(prompt=[[1, 2], [3]]) == [1, 2]
    for nonsense in (b"", b"{", b"[]", b"3", b'{"messages": 3}', b'{"messages": [{"role": "x", "content": [3]}]}',
                     b'{"prompt": [1, "a", null]}', b'{"prompt": {"a": 1}}', b"[" * 100_000, b"\xff\xfe"):  # fmt: skip
        assert prompt_of(nonsense) == ""


# ---------------------------------------------------------------- wrong routers
WRONG = [
    ("an error goes to another", router, "{429, 503}", "{429, 500, 503}",
     "an_answer_of_the_server_is_an_answer_even_if_it_is_an_error"),
    ("who is full has the last word", router, "{429, 503}", "{503}", "full_or_leaving_another_takes_over"),
    ("who leaves has the last word", router, "{429, 503}", "{429}", "full_or_leaving_another_takes_over"),
    ("for ever another", router, "lost < 2", "lost < 9", "a_request_that_two_replicas_were_lost_with_gets_no_third"),
    ("lost is lost", router, "lost < 2", "lost < 1", "lost_before_the_first_byte_another_takes_over"),
    ("its headers go out first", router,
     'piece = await anext(pieces, b"")\n    headers', 'piece = b":\\n"\n    headers',
     "lost_before_the_first_byte_another_takes_over"),
    ("a stream just ends", router, "await send(dict(type=\"http.response.body\", body=event.encode(), more_body=True))",
     "pass", "broken_in_the_middle_it_ends_with_an_error_and_nobody_else_is_asked"),
    ("no connection counts as a loss", router, "(httpx2.ConnectError, httpx2.ConnectTimeout)",
     "httpx2.UnsupportedProtocol", "no_connection_another_takes_over"),
    ("no connection is no failure", router, "ConnectTimeout):\n                    self.pool.saw(replica, False)",
     "ConnectTimeout):\n                    pass", "refused_connections_make_ill_without_a_check"),
    ("pieces are collected", router, "pieces = upstream.aiter_raw()", "pieces = upstream.aiter_raw(2**20)",
     "a_stream_passes_piece_by_piece"),
    ("nobody looks whether the client is there", router, "asyncio.wait((relay, gone)", "asyncio.wait((relay,)",
     "a_client_that_leaves_before_any_answer_does_so_too"),
    ("the query is lost", router, '(b"?" + query if query else b"")', 'b""', "requests_and_answers_pass_unchanged"),
    ("the path is decoded", router, 'request.scope.get("raw_path", request.url.path.encode())',
     "request.url.path.encode()", "requests_and_answers_pass_unchanged"),
    ("the router's own host", router, '"host",', "", "requests_and_answers_pass_unchanged"),
    ("new requests while it leaves", router, "lost < 2 and not self.draining", "lost < 2",
     "draining_all_refuses_what_is_new"),
    ("for ever patient", router, "asyncio.timeout(self.stall_seconds)", "asyncio.timeout(None)",
     "a_client_that_takes_nothing_is_dropped"),
    ("a body may take its time", router, "asyncio.timeout(self.body_seconds)", "asyncio.timeout(None)",
     "a_body_that_does_not_come_is_408"),
    ("any body", router, "if len(body) > self.max_body:", "if False:", "a_body_too_long_is_413"),
    ("a body of exactly the limit", router, "len(body) > self.max_body", "len(body) >= self.max_body",
     "a_body_too_long_is_413"),
    ("an address too long is an accident", router, "except httpx2.InvalidURL as error:", "except KeyError as error:",
     "what_cannot_be_asked_is_told_in_openais_shape"),
    ("nowhere, in plain text", router, "exception_handlers={HTTPException: _told}", "exception_handlers={}",
     "what_cannot_be_asked_is_told_in_openais_shape"),
    ("health is always fine", router, "well = not self.draining and", "well = True or",
     "nobody_there_is_503_with_retry_after"),
    ("no label", merged, "_labelled(line, f", "str(line or f",
     "families_stay_together_when_servers_know_different_ones"),
    ("its own labels are lost", merged, "{',' + labels if labels else ''}", "",
     "families_stay_together_when_servers_know_different_ones"),
    ("each server's families anew", merged, "first = name not in families", "first = True",
     "families_stay_together_when_servers_know_different_ones"),
    ("the last one speaks for all", merged, "sum(t.get(name) or 0 for t in told.values())",
     "[*told.values()][-1][name]", "load_and_stats_are_those_of_all"),
    ("pages of one", merged, "sum(count[name] for count in counts)", "counts[0][name]",
     "load_and_stats_are_those_of_all"),
    ("failures need not be in a row", pool, "(self.passed + 1, 0) if well", "(self.passed + 1, self.failed) if well",
     "health_has_hysteresis"),
    ("successes need not be in a row", pool, "else (0, self.failed + 1)", "else (self.passed, self.failed + 1)",
     "health_has_hysteresis"),
    ("one failure is enough", pool, "self.failed >= self.fall", "self.failed >= 1", "health_has_hysteresis"),
    ("one success is enough", pool, "self.passed >= self.rise", "self.passed >= 1", "health_has_hysteresis"),
    ("every answer is health", pool, "self.saw(replica, answer.status_code == 200)", "self.saw(replica, True)",
     "the_ill_get_nothing_until_they_are_well"),
    ("who was ill still knows everything", pool, "self.on_gone(replica.url)  #", "pass  #",
     "a_prefix_stays_together_until_its_replica_is_ill"),
    ("it only counts up", pool, "            replica.ongoing -= 1\n", "", "outstanding_is_exact_on_every_way_out"),
    ("it counts down where all is well", pool,
     "        try:\n            yield\n        finally:\n            replica.on",
     "        yield\n        if True:\n            replica.on",
     "a_client_that_leaves_its_stream_closes_it_behind_the_router"),
    ("who leaves is still chosen", pool, "            replica.draining = True\n", "            pass\n",
     "draining_one_finishes_what_it_has_and_takes_nothing_new"),
    ("nobody waits for who leaves", pool, "while any(replica.ongoing", "while False and any(replica.ongoing",
     "draining_one_finishes_what_it_has_and_takes_nothing_new"),
]  # fmt: skip


@pytest.mark.parametrize("what, original, right, wrong, who", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_routers_are_noticed(what, original, right, wrong, who, monkeypatch):
    module, test = wrong_version(original, right, wrong), globals()[f"test_{who}"]
    monkeypatch.setattr(fleet_world, "PATIENCE", 1.5)
    monkeypatch.setattr("test_router.WAIT", 0.5)
    if original is pool and who != "health_has_hysteresis":
        monkeypatch.setattr(router, "Pool", module.Pool)
        module = router
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)  # of tasks that a failing test left
    if original is merged and "families" not in who:
        monkeypatch.setattr(router, "merged", module)
        module = router
    with pytest.raises((AssertionError, TimeoutError, ValueError, httpx2.TransportError)):
        for dies in (dies_at_once, dies_after_its_headers) if "lost_before" in who else [None]:
            test(dies, module=module) if dies else test(module=module)
    gc.collect()


# ---------------------------------------------------------------- a real client
@in_loop
async def test_the_openai_client_works_through_it():
    openai = pytest.importorskip("openai")
    async with routed(streams("a", "b", "c", breaks=True)) as world:
        world.upstreams[0].go.set()
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(**CHAT, stream=True)
            got = []
            with pytest.raises(openai.APIError, match="broke off"):
                async for piece in stream:
                    got.append(piece.choices[0].delta.content)
            assert got == ["a", "b", "c"]
        world.upstreams[0].kill()
        await until(lambda: world.pool.ongoing == 0, "ended")
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(**CHAT)
            assert refused.value.status_code == 503
