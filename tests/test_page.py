"""The page at / in a real Chromium: text streams in, stop stops, the engine shows, and hostile text stays text.

Skipped where there is no Chromium. Each check is shown to fail by a page with one fault (WRONG, below).
"""

# ruff: noqa: E402  what may be missing is looked for first
import json
import re
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason='the server is not installed: pip install "minserve[server]"')
playwright = pytest.importorskip(
    "playwright.sync_api", reason='playwright is missing: pip install "minserve[dev]"'
)

from fault_world import Gate, at_rest, until
from serving_world import serve_in_thread, tiny_engine, tiny_folder

import minserve
from minserve.request import SamplingParams

PAGE = Path(minserve.__file__).parent / "assets" / "page.html"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium in PATH: apt install chromium, or install Chrome, to test the page in it",
)
HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=1</script>&lt;b&gt; <b>bold</b>"
MODEL = "tiny <b>model</b>"
SECONDS = 120
SHAPES = {"desktop": (1280, 800), "phone": (360, 640)}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("page") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with serve_in_thread(tiny_engine(folder), model_name=MODEL) as server:
        yield server


@contextmanager
def visit(browser, url, shape="desktop", html=None, **options):
    """The page in a fresh context. Whatever happens there, it talks to its own server only, and no script fails."""
    width, height = SHAPES[shape]
    context = browser.new_context(viewport=dict(width=width, height=height), **options)
    page, asked, failed = context.new_page(), [], []
    page.set_default_timeout(SECONDS * 1000)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    if html is not None:  # a wrong version of it
        page.route(f"{url}/", lambda route: route.fulfill(body=html, content_type="text/html"))
    try:
        page.goto(url)
        yield page
        assert not failed, failed
        strange = [where for where in asked if not where.startswith((url + "/", "data:"))]
        assert not strange, f"it asked {strange}"
    finally:
        context.close()


def settle(page, **settings):
    """Greedy answers of a length that is known, whatever else is asked for."""
    page.locator("summary").click()
    for name, value in (dict(temperature="0", max_tokens="12") | settings).items():
        page.locator(f"#settings [name={name}]").fill(value)


def ask(page, text):
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def expected(server, messages, **params):
    """What the engine itself answers."""
    engine = server.engine

    async def directly():
        prompt = engine.tokenizer.chat(messages)
        stream = await server.serving.add(prompt, SamplingParams(**params))
        return (await stream.finish())[0].text

    return server.call(directly())


# ---------------------------------------------------------------- what must hold
def check_answers(browser, server, html=None):
    """Two turns: the second is told the first. Each is, letter by letter, what the engine says."""
    with visit(browser, server.url, html=html) as page:
        settle(page)
        page.get_by_label("System prompt").fill("Be brief.")
        messages = [{"role": "system", "content": "Be brief."}]
        for turn, question in enumerate(["Why is the sky blue?", "And the sea?"]):
            messages.append({"role": "user", "content": question})
            ask(page, question)
            note = page.locator(".assistant .note").nth(turn)
            note.wait_for()
            text = page.locator(".assistant .text").nth(turn).text_content()
            assert text == expected(server, messages, max_tokens=12)
            messages.append({"role": "assistant", "content": text})
        said = note.text_content()
        assert re.search(r"first token after [\d,]+ ms · \d+ tokens", said), said
        assert page.get_by_label("Your message").input_value() == ""
    at_rest(server.serving)


def check_streams_and_stops(browser, server, html=None):
    """Each token shows as soon as it is made; Stop ends the request in the engine as well."""
    with visit(browser, server.url, html=html) as page, Gate(server.engine) as gate:
        settle(page, max_tokens="300")
        ask(page, "Why is the sky blue?")
        text = page.locator(".assistant .text")
        gate.reached()
        assert text.text_content() == ""
        seen = []
        for steps in (6, 12):  # of a step at a time not each need make a character certain
            gate.let(6)
            gate.passed(steps)
            page.wait_for_function(
                "n => document.querySelector('.assistant .text').textContent.length > n",
                arg=len("".join(seen[-1:])),
            )
            seen.append(text.text_content())
        assert seen[1].startswith(seen[0])
        assert page.locator("#log").get_attribute("aria-busy") == "true"
        assert not page.get_by_role("button", name="Send").is_visible()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped").wait_for()
        gate.reached()
        until(lambda: server.serving._between, "the server to notice")
        gate.let(1)
        at_rest(server.serving)
        assert page.get_by_role("button", name="Send").is_visible()
        assert page.locator("#log").get_attribute("aria-busy") == "false"


def check_live(browser, server, html=None):
    """Its numbers are the engine's, while a batch runs and afterwards."""
    pages, engine = server.engine.pages, server.engine
    with visit(browser, server.url, html=html) as page, Gate(engine) as gate:
        shows = lambda id, value: page.wait_for_function(
            "([id, value]) => document.getElementById(id).textContent === value", arg=[id, value]
        )
        shows("health", "ready")
        assert page.locator("#model").text_content() == MODEL
        shows("running", "0")
        settle(page, max_tokens="40")
        page.get_by_role("button", name="Ask for 8 answers").click()
        gate.reached()
        gate.let(4)  # a prompt of its own, then its forks
        gate.passed(4)
        gate.reached()
        assert engine.scheduler.running and engine.scheduler.waiting
        shows("running", str(len(engine.scheduler.running)))
        shows("seats", f"of {engine.scheduler.max_running}")
        shows("waiting", str(len(engine.scheduler.waiting)))
        shows("in_use", str(pages.in_use))
        shows("free", str(len(pages.free)))
        label = page.locator("#pages").get_attribute("aria-label")
        assert label.startswith(f"Pages: {pages.in_use} in use"), label
        blue, grey = (page.evaluate(COUNT, ["pages", name]) for name in ("blue", "free"))
        assert blue > 0 < grey and abs(blue / (blue + grey) - pages.in_use / pages.num_pages) < 0.1
        gate.let(10_000)
        page.get_by_text("8 answers,").wait_for()
        shows("running", "0")
        shows("in_use", "0")
        for of in ("ttft", "itl"):
            cells = page.locator(f"[data-of={of}] td").all_text_contents()
            numbers = [float(cell.replace(",", "")) for cell in cells]
            assert len(numbers) == 3 and 0 < numbers[0] <= numbers[1] <= numbers[2], cells
        for drawn in ("minute", "steps"):
            assert page.evaluate(COUNT, [drawn, "blue"]) > 0, f"nothing is drawn in {drawn}"
    at_rest(server.serving)


COUNT = """([id, name]) => {
    // pixels of a canvas in one of the page's colours
    const canvas = document.getElementById(id), pen = canvas.getContext("2d");
    const hex = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    const want = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
    let n = 0;
    for (let i = 0; i < data.length; i += 4)
        n += data[i + 3] === 255 && want.every((c, j) => Math.abs(data[i + j] - c) < 6);
    return n;
}"""


def check_hostile(browser, server, html=None):
    """Text of the user, the model and the server is shown as it is: no element comes of it, no script of it runs."""
    chunk = lambda delta, end=None: {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
    stream = [chunk({"role": "assistant", "content": ""}), chunk({"content": HOSTILE}), chunk({}, "stop")]
    body = "".join(f"data: {json.dumps(part)}\n\n" for part in stream) + "data: [DONE]\n\n"
    with visit(browser, server.url, html=html) as page:
        page.locator("#health.ready").wait_for(state="attached")
        page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
        )
        ask(page, HOSTILE)
        page.locator(".note").wait_for()
        assert page.locator(".text").all_text_contents() == [HOSTILE] * 2
        assert page.locator(".who").last.text_content() == MODEL
        page.unroute("**/v1/chat/completions")
        error = {"error": dict(message=HOSTILE, type="x", param=None, code=None)}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
        ask(page, "again")
        page.get_by_role("alert").wait_for()
        assert page.get_by_role("alert").text_content() == HOSTILE
        assert page.locator("#log").locator("img, script, b").count() == 0
        assert page.locator("header b").count() == 0
        assert page.title() != "1"


def check_errors(browser, server, html=None):
    """The server's complaint shows, in its own words; the question is there to be asked again, and can be."""
    with visit(browser, server.url, html=html) as page:
        settle(page, temperature="-1")
        ask(page, "Why?")
        page.get_by_role("alert").wait_for()
        assert "temperature" in page.get_by_role("alert").text_content()
        assert page.get_by_label("Your message").input_value() == "Why?"
        page.locator("[name=temperature]").fill("0")
        page.get_by_label("Your message").press("Enter")
        page.locator(".assistant .note").wait_for()
        text = page.locator(".assistant .text").last.text_content()
        assert text == expected(
            server, [{"role": "user", "content": "Why?"}], max_tokens=12
        )  # told once, not twice


def check_cut(browser, html=None):
    """A server that dies in the middle of an answer: what came stays, and it is said that the rest did not."""
    with Dying(html or PAGE.read_text()) as url, visit(browser, url) as page:
        page.locator("#health.ready").wait_for(state="attached")
        ask(page, "Why?")
        page.get_by_role("alert").wait_for()
        assert re.search("ended before|cannot be reached", page.get_by_role("alert").text_content())
        assert page.locator(".assistant .text").text_content() == "half an ans"
        assert page.get_by_role("button", name="Send").is_visible()


class Dying:
    """A server whose answers break off."""

    def __init__(self, html: str):
        chunk = {"choices": [{"index": 0, "delta": {"content": "half an ans"}, "finish_reason": None}]}
        pages = dict(total=4, free=4, cached=0, in_use=0)
        stats = dict(model="dying", running=0, waiting=0, max_running=4, pages=pages, steps=0, healthy=True)
        stats["requests"] = dict(finished=0, failed=0)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.say("text/html", html) if self.path == "/" else self.say(
                    "application/json", json.dumps(stats)
                )

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.say("text/event-stream", f"data: {json.dumps(chunk)}\n\n")  # and no [DONE]

            def say(self, kind, text):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(SECONDS)


def check_gone(browser, folder, html=None):
    """A server that is gone: said in the corner and as the answer; the numbers are no longer vouched for."""
    with serve_in_thread(tiny_engine(folder)) as server:
        context = visit(browser, server.url, html=html)
        page = context.__enter__()
        page.locator("#health.ready").wait_for(state="attached")
    try:
        page.locator("#health.unreachable").wait_for()
        assert "stale" in page.locator("#live").get_attribute("class")
        ask(page, "Why?")
        page.get_by_role("alert").wait_for()
        assert "cannot be reached" in page.get_by_role("alert").text_content()
        assert page.get_by_label("Your message").input_value() == "Why?"
    finally:
        context.__exit__(None, None, None)


def check_hidden(browser, server, html=None):
    """Nobody looks, nothing is asked; whoever comes back sees numbers again."""
    with visit(browser, server.url, html=html) as page:
        page.locator("#health.ready").wait_for(state="attached")
        hide = "is => { Object.defineProperty(document, 'hidden', {value: is, configurable: true});" \
               " document.dispatchEvent(new Event('visibilitychange')); }"  # fmt: skip
        asked = []
        page.evaluate(hide, True)
        page.wait_for_timeout(700)  # what was asked already comes back
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(1200)
        assert not asked, asked
        page.evaluate(hide, False)
        page.evaluate(hide, False)  # twice is once
        page.wait_for_timeout(1800)
        assert 1 <= len(asked) <= 5, asked  # twice a second; not four times


def check_keyboard(browser, server, html=None):
    """Enter sends, Shift+Enter does not, Escape stops, Clear forgets: also what the model is told."""
    with visit(browser, server.url, html=html) as page:
        settle(page)
        text = page.get_by_label("Your message")
        text.fill("one")
        text.press("Shift+Enter")
        text.press_sequentially("two")
        assert page.locator(".message").count() == 0 and text.input_value() == "one\ntwo"
        text.press("Enter")
        page.locator(".note").wait_for()
        assert page.locator(".user .text").text_content() == "one\ntwo"
        page.get_by_role("button", name="Clear").click()
        assert page.locator(".message").count() == 0 and page.get_by_text("Ask it something").is_visible()
        with Gate(server.engine) as gate:
            ask(page, "three")
            gate.reached()
            text.press("Escape")
            page.get_by_text("stopped").wait_for()
        at_rest(server.serving)
        ask(page, "four")
        page.locator(".note").nth(1).wait_for()
        answer = page.locator(".assistant .text").last.text_content()
        assert answer == expected(server, [{"role": "user", "content": "four"}], max_tokens=12)


def check_layout(browser, server, html=None):
    """Nothing sticks out at any width, everything that can be used has a name, and text is easy to read."""
    for shape in SHAPES:
        for scheme in ("light", "dark"):
            with visit(browser, server.url, shape, html, color_scheme=scheme) as page:
                page.locator("#health.ready").wait_for(state="attached")
                settle(page)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                    f"{shape} overflows"
                )
                if shape == "phone":
                    assert not page.locator("#live").is_visible()
                    page.get_by_role("button", name="Engine").click()
                    assert not page.get_by_label("Your message").is_visible()
                assert page.locator("#live").is_visible()
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                    f"{shape} overflows"
                )
                assert page.evaluate(NAMELESS) == []
                for color in ("ink", "muted", "bad"):
                    for ground in ("paper", "card"):
                        contrast = page.evaluate(CONTRAST, [color, ground])
                        assert contrast >= 4.5, f"{color} on {ground}, {scheme}: {contrast:.2f}"
                assert page.evaluate(CONTRAST, ["on", "blue"]) >= 4.5


NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, canvas, [role]")].filter((e) =>
    !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim() || ["status", "alert"].includes(e.role))
).map((e) => e.outerHTML)"""
CONTRAST = """(names) => {  // WCAG 2: of two of the page's colours
    const style = getComputedStyle(document.documentElement);
    const [a, b] = names.map((name) => {
        const hex = style.getPropertyValue("--" + name).trim();
        const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
            .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    });
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""

CHECKS = {
    "answers": check_answers, "streams": check_streams_and_stops, "live": check_live, "hostile": check_hostile,
    "errors": check_errors, "cut": lambda b, s, h=None: check_cut(b, h),
    "gone": lambda b, s, h=None: check_gone(b, Path(s.folder), h), "hidden": check_hidden,
    "keyboard": check_keyboard, "layout": check_layout,
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_the_page(browser, server, folder, check):
    server.folder = folder
    CHECKS[check](browser, server)


# ---------------------------------------------------------------- the tests can fail
WRONG = [  # right, wrong, who must notice
    ("conversation.push({ role: \"assistant\"", "conversation.concat({ role: \"assistant\"", "answers"),
    ("body.messages.unshift({ role: \"system\"", "body.messages.push({ role: \"system\"", "answers"),
    ("this.node.appendData(text);", "", "answers"),
    ("$(\"text\").value = \"\";\n", "", "answers"),
    ("stream: true, ", "", "streams"),
    ("function stop() { writing?.abort(); }", "function stop() { writing = null; buttons(); }", "streams"),
    ("$(\"stop\").hidden = !writing; $(\"send\").hidden = !!writing;", "", "streams"),
    ("textContent = say(stats.waiting)", "textContent = say(stats.running)", "live"),
    ("[in_use, \"blue\"]", "[free, \"blue\"]", "live"),
    ("i < Math.min(n, to); i++", "i < Math.min(n, to) - 9; i++", "live"),
    ("  drawSteps();\n}", "}", "live"),
    ("textContent: text }", "innerHTML: text }", "hostile"),
    ("this.node.appendData(text);", "this.node.parentNode.innerHTML += text;", "hostile"),
    ("$(\"model\").textContent", "$(\"model\").innerHTML", "hostile"),
    ("said?.error?.message ??", "", "errors"),
    ("      conversation.pop();\n", "", "errors"),
    ("$(\"text\").value ||= text;", ";", "errors"),
    ("if (done) throw new Error(\"The connection ended before the answer did.\");", "if (done) return;", "cut"),
    ("const lost = error instanceof TypeError;", "const lost = false;", "gone"),
    ("catch { return health(\"unreachable\"); }", "catch { return false; }", "gone"),
    ("!document.hidden; await", "true; await", "hidden"),
    ("  if (polling) return;\n", "", "hidden"),
    ("&& !event.shiftKey", "", "keyboard"),
    ("if (event.key === \"Escape\") stop();", "", "keyboard"),
    ("  stop();\n  messages = [];\n", "  stop();\n", "keyboard"),
    ("/ minmax(0, 1fr);\n", "/ auto;\n", "layout"),
    ("aria-label=\"Your message\" ", "", "keyboard"),
    ("--muted: #626a73", "--muted: #9aa0a6", "layout"),
    ("main[data-view=\"chat\"] #live, ", "", "layout"),
    ("<link rel=\"icon\"", "<link rel=\"stylesheet\" href=\"https://example.invalid/\"><link rel=\"icon\"", "errors"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "right, wrong, check", WRONG, ids=[f"{check}: {wrong[:40]}" for _, wrong, check in WRONG]
)
def test_a_wrong_page_is_noticed(monkeypatch, browser, server, folder, right, wrong, check):
    html = PAGE.read_text()
    assert html.count(right) == 1, f"{right!r} occurs {html.count(right)} times"
    server.folder = folder
    with monkeypatch.context() as impatient, pytest.raises((AssertionError, playwright.Error)):
        for where in (__name__, "fault_world"):
            impatient.setattr(f"{where}.SECONDS", 3)
        CHECKS[check](browser, server, html.replace(right, wrong))
    at_rest(server.serving)
