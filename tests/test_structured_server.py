"""Answers of a given form, asked for with the real client."""

import json
from contextlib import contextmanager
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from serving_world import PATIENCE, serve_in_thread, tiny_folder

pytest.importorskip(
    "llguidance", reason="answers of a given form need it: pip install 'minserve[structured]'"
)


class Weather(BaseModel):
    sky: Literal["blue", "grey"]
    degrees: Literal[7, 21]
    wind: bool


SCHEMA = Weather.model_json_schema() | {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
CHAT = dict(model="tiny", messages=[{"role": "user", "content": "How is the weather? Answer in JSON."}])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_in_thread(tiny_folder(tmp_path_factory.mktemp("structured") / "tiny")) as served:
        yield served


@pytest.fixture
def client(served):
    base_url = f"{served.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="-", max_retries=0, timeout=PATIENCE) as client:
        yield client


@contextmanager
def refused(param: str, why: str):
    with pytest.raises(openai.BadRequestError, match=why) as error:
        yield
    assert error.value.param == param


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_to(client, seed):
    answer = client.chat.completions.create(**CHAT, response_format=FORMAT, max_tokens=150, seed=seed)
    (choice,) = answer.choices
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert choice.finish_reason == "stop"


def test_parse_gives_an_object_of_the_class(client):
    answer = client.chat.completions.parse(**CHAT, response_format=Weather, max_tokens=150, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_it_streams_and_each_of_n_keeps_to_it(client):
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        **CHAT, response_format=FORMAT, max_tokens=150, seed=2, n=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


def test_any_object(client):
    close = {"logit_bias": {str(token): 100 for token in client_tokens(client, '"}')}}
    answer = client.chat.completions.create(
        **CHAT, response_format={"type": "json_object"}, max_tokens=300, temperature=0, **close
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def client_tokens(client, text):
    url = str(client.base_url).removesuffix("/v1/") + "/tokenize"
    return client.post(url, body={"prompt": text}, cast_to=object)["tokens"]


ASKED = [
    ({"regex": "[a-f]{2}-[0-9]{3}"}, lambda text: text[2] == "-" and text[3:].isdigit()),
    ({"choice": ["blue", "grey, or so"]}, lambda text: text in ("blue", "grey, or so")),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, lambda text: text.strip("()") == "x"),
    ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
]


@pytest.mark.parametrize("asked, right", ASKED, ids=[next(iter(asked)) for asked, _ in ASKED])
def test_structured_outputs_as_vllm_has_them(client, asked, right):
    x, extra = client_tokens(client, "x"), {"structured_outputs": asked}
    answer = client.completions.create(
        model="tiny", prompt="the sky is", max_tokens=150, seed=3, logit_bias={str(x[0]): 5}, extra_body=extra
    )
    assert right(answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


def test_text_is_any_text(client):
    plain = client.chat.completions.create(**CHAT, max_tokens=8, seed=1)
    text = client.chat.completions.create(**CHAT, max_tokens=8, seed=1, response_format={"type": "text"})
    assert text.choices[0].message.content == plain.choices[0].message.content


REFUSED = [
    (dict(response_format={"type": "xml"}), "response_format", "can be"),
    (dict(response_format={"type": "json_schema"}), "response_format", "needs the schema"),
    (
        dict(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "objekt"}},
            }
        ),
        "response_format",
        "Invalid type: objekt",
    ),
    (dict(extra_body={"structured_outputs": {"regex": "("}}), "structured_outputs", "cannot be compiled"),
    (dict(extra_body={"structured_outputs": {"tag": "("}}), "structured_outputs", "not supported"),
    (
        dict(response_format={"type": "json_object"}, extra_body={"structured_outputs": {"regex": "a"}}),
        "response_format",
        "one form",
    ),
    (dict(response_format={"type": "json_object"}, extra_body={"min_tokens": 3}), None, "min_tokens"),
]


@pytest.mark.parametrize("fields, param, why", REFUSED, ids=[why for *_, why in REFUSED])
def test_what_cannot_be_is_a_400(served, client, fields, param, why):
    with refused(param, why):
        client.chat.completions.create(**CHAT, **fields)
    assert served.engine.pages.in_use == 0 and not served.engine.outputs
