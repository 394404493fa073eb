"""A streaming client that measures: it asks any OpenAI-compatible server and writes down when each token came.

    async with Client(url) as client:
        await client.find_model()                    who is there; raises Unreachable
        await client.ask(body, shot)                 one request; what happened is in shot.timeline and shot.why

What is not measured here is more important than what is
    a chunk is not a token     one may hold several (speculation) or none (half a character), so tokens are counted from
                               `usage`: of each chunk where the server sends it (stream_options.continuous_usage_stats),
                               else of the last one, and then spread evenly over the chunks with text: TPOT and e2e are
                               exact, single gaps are not
    a role is not a token      the first chunk of a chat says who speaks; TTFT waits for text
    max_tokens is not a count  neither is the text, tokenized once more
    the end is not a token     finish_reason, usage and [DONE] come later, and count for nothing

Story    notebooks/13_serving_and_slos.ipynb
"""

import asyncio
import json
from collections.abc import AsyncIterator
from json import JSONDecodeError

import httpx2

from minserve.lab.generator import Shot
from minserve.metrics import REASONS, Timeline

REFUSED = (429, 503)  # a full queue, a server that is closing: the request was never served


class Unreachable(RuntimeError):
    """Nobody answers there, or not as an OpenAI-compatible server does."""


class Answer:
    """What the chunks of one stream say of a completion's times."""

    def __init__(self, timeline: Timeline):
        self.timeline, self.reason, self.counts = (
            timeline,
            None,
            False,
        )  # counts: the server says how many tokens
        self.uncounted: list[float] = []  # when text came whose tokens no usage has counted yet

    def take(self, now: float, chunk: dict) -> None:
        timeline, choice = self.timeline, (chunk.get("choices") or [{}])[0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text:
            timeline.told(now, 0, text)
            self.uncounted.append(now)
        if usage := chunk.get("usage"):
            self.counts = True
            new = (usage.get("completion_tokens") or 0) - len(timeline.tokens)
            for at in spread(self.uncounted or [now], new):
                timeline.told(at, 1, "")
            self.uncounted = []
            timeline.prompt_tokens = usage.get("prompt_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            timeline.cached_tokens = details.get("cached_tokens") or 0
        self.reason = choice.get("finish_reason") or self.reason

    def end(self, now: float) -> str:
        """The stream is over. Returns what was wrong with it, or nothing."""
        why = ""
        if self.reason is None:
            why = "the stream ended before a finish_reason"
        elif not self.counts:
            why = "no usage in the stream, so nobody knows its tokens: the server ignores stream_options.include_usage"
        known = self.reason if self.reason in REASONS else "stop"  # such as "tool_calls"
        self.timeline.ended(now, "error" if why else known)
        return why


def spread(times: list[float], tokens: int) -> list[float]:
    """When so many tokens came, if all that is known is when text did: evenly, from the first time to the last."""
    last = len(times) - 1
    return [times[round(i * last / (tokens - 1))] if tokens > 1 else times[0] for i in range(tokens)]


class Client:
    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        endpoint: str = "chat",
        timeout: float = 600.0,
    ):
        """endpoint: "chat" or "completions"; timeout: seconds for a whole answer; key: sent as a bearer token."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.timeout, self.chat = model, timeout, endpoint == "chat"
        self.path = "/v1/chat/completions" if self.chat else "/v1/completions"
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy would be measured, too
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The model that was asked for, or the first one that the server has. Raises Unreachable."""
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
            if response.status_code != 200:
                raise Unreachable(
                    f"{self.url}/v1/models answers {response.status_code}: {_error_in(response.text)}"
                )
            names = [model["id"] for model in response.json()["data"]]
        except (httpx2.HTTPError, httpx2.InvalidURL, JSONDecodeError, KeyError, TypeError) as error:
            raise Unreachable(
                f"no OpenAI-compatible server at {self.url}: {type(error).__name__} {error}".rstrip()
            ) from None
        if not names or (self.model or names[0]) not in names:
            raise Unreachable(
                f"{self.url} serves {', '.join(names) or 'no model'}, not {self.model or 'anything'}"
            )
        self.model = self.model or names[0]
        return self.model

    def body(self, prompt: str, output_tokens: int, priority: int = 0) -> dict:
        """Exactly so many tokens (ignore_eos is an extension of vLLM's; a server without it may stop early)."""
        asks = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        most = {"max_completion_tokens" if self.chat else "max_tokens": output_tokens}
        options = {"include_usage": True, "continuous_usage_stats": True}
        urgent = {"priority": priority} if priority else {}
        return {
            "model": self.model, **asks, **most, "ignore_eos": True, "temperature": 0.0, "stream": True,
            "stream_options": options, **urgent,
        }  # fmt: skip

    async def ask(self, body: dict, shot: Shot) -> None:
        """Stream one answer into shot.timeline. Whatever goes wrong ends the timeline, and is in shot.why."""
        now, reason = asyncio.get_running_loop().time, "error"
        try:
            async with asyncio.timeout(self.timeout):
                async with self._http.stream("POST", self.path, json=body) as response:
                    if response.status_code == 200:
                        shot.why = await self._read(response, Answer(shot.timeline), now)
                        return
                    reason = "refused" if response.status_code in REFUSED else "error"
                    text = (await response.aread()).decode(errors="replace")
                    shot.why = f"{response.status_code}: {_error_in(text)}"
        except TimeoutError:
            reason, shot.why = "timeout", f"no answer within {self.timeout:g} s"
        except (httpx2.HTTPError, httpx2.StreamError, Broken) as error:
            shot.why = f"{type(error).__name__}: {error}"
        except (JSONDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
            shot.why = f"a chunk that is not of OpenAI's shape: {error}"
        shot.timeline.ended(now(), reason)

    async def _read(self, response, answer: Answer, now) -> str:
        async for line in lines(response.aiter_bytes()):
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                break
            chunk = json.loads(data)
            if chunk.get("error"):
                raise Broken(_error_in(data))
            answer.take(now(), chunk)
        return answer.end(now())


async def lines(pieces) -> AsyncIterator[str]:
    """Bytes as they come -> lines. Only a newline ends one: an answer may hold what str.splitlines() splits at."""
    held = b""
    async for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if held:
        yield held.decode(errors="replace")


class Broken(RuntimeError):
    """The server said in the middle of a stream that it cannot go on."""


def _error_in(text: str) -> str:
    """What an error body says, in OpenAI's shape or any other."""
    try:
        error = json.loads(text)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (JSONDecodeError, KeyError, TypeError):
        return text[:200]
