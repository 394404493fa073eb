"""A prefill server, a decode server and the proxy in front, in this process; and one server that does both."""

import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import uvicorn
from fault_world import SECONDS, at_rest, until
from serving_world import serve_in_thread, tiny_engine

from minserve.cluster.disaggregated import Disaggregated
from minserve.cluster.front import Server
from minserve.cluster.inbox import InProcess
from minserve.cluster.router import create_app


@contextmanager
def proxy_in_thread(prefill: str, decode: str, **options):
    """The proxy in front of two servers: .url .proxy"""
    proxy, ready, urls = Disaggregated(prefill, decode, **options), threading.Event(), []

    def announce(url):
        urls.append(url)
        ready.set()

    config = uvicorn.Config(create_app(proxy), host="127.0.0.1", port=0, log_level="error")
    server = Server(config, announce, lambda: proxy.drain(1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert ready.wait(SECONDS), "the proxy did not start"
        yield SimpleNamespace(url=urls[0], proxy=proxy)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


@contextmanager
def disaggregated(folder, ends=None, **engine):
    """.url, that of the proxy; .prefill .decode, servers; .producer .consumer, their connectors."""
    producer, consumer = ends or InProcess.pair(mode="layer", lease=SECONDS)
    with ExitStack() as stack:
        engines = [tiny_engine(folder, connector=end, **engine) for end in (producer, consumer)]
        prefill, decode = (stack.enter_context(serve_in_thread(its)) for its in engines)
        front = stack.enter_context(proxy_in_thread(prefill.url, decode.url))
        stack.callback(producer.close)
        stack.callback(consumer.close)
        parts = dict(prefill=prefill, decode=decode, producer=producer, consumer=consumer)
        yield SimpleNamespace(url=front.url, proxy=front.proxy, **parts)
        nothing_left(SimpleNamespace(**parts))


def nothing_left(its) -> None:
    for server in (its.prefill, its.decode):
        at_rest(server.serving)
    its.producer._forget()
    until(lambda: not its.producer.sender or its.producer.sender.waiting_bytes == 0, "the link to be empty")
    if isinstance(its.consumer, InProcess):
        until(lambda: len(its.consumer.inbox) == 0, "messages that nobody wants to be deleted")
