"""The HTTP client against a stub server on loopback that checks the protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from dbksvd_dask.errors import InputError, JobError
from dbksvd_dask.evaluate import autointerp as ai
from tests.jobs import PATIENCE

PNG = b"\x89PNG\r\n\x1a\n rest of the image"
ENVIRONMENT = [
    f"{p}_{n}" for p in ("DBKSVD_OPENAI", "OPENAI") for n in ("BASE_URL", "MODEL", "API_KEY", "EMBEDDING_MODEL")
]


class Stub:
    """A server that speaks the protocol: it keeps the requests, and answers from a queue or by the rules."""

    def __init__(self):
        self.requests, self.queue = [], []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append((self.path, dict(self.headers), body))
                status, headers, answer = (
                    stub.queue.pop(0) if stub.queue else (200, {}, stub.rule(self.path, body))
                )
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def rule(self, path, body):
        if path == "/v1/embeddings":
            assert set(body) == {"model", "input"}
            rows = [{"index": i, "embedding": [float(len(t)), 1.0]} for i, t in enumerate(body["input"])]
            return {"object": "list", "data": rows[::-1]}  # the order of the rows is not promised
        assert path == "/v1/chat/completions"
        (message,) = body["messages"]
        assert message["role"] == "user"
        for part in message["content"]:
            assert part["type"] in ("text", "image_url")
            assert isinstance(part["text"] if part["type"] == "text" else part["image_url"]["url"], str)
        prompt = message["content"][0]["text"]
        if "JSON list" in prompt:
            n = len([p for p in message["content"][1:] if p["type"] == "text"])
            text = f"Here you are:\n```json\n{list(range(n))}\n```"
        else:
            text = "  They all mention boats. "
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def stub(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Stub()
    yield server
    server.close()


def make_client(stub, **options):
    waits = []
    client = ai.OpenAIClient(stub.url, "chatty", "vectors", "secret-key", sleep=waits.append, **options)
    return client, waits


def test_texts_are_explained_through_the_chat_endpoint(stub):
    client, _ = make_client(stub)
    explainer = ai.OpenAIExplainer(client, temperature=0.0)
    answer = explainer.explain([ai.Example("a boat", 2.5), ai.Example("a ship", 1.25)])
    assert answer == "They all mention boats."
    path, headers, body = stub.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret-key"
    assert headers["Content-Type"] == "application/json"
    assert (body["model"], body["temperature"]) == ("chatty", 0.0)
    content = body["messages"][0]["content"]
    assert content[0]["text"] == ai.TEXT_PROMPT
    assert [p["text"] for p in content[1:]] == ["1. (activation 2.5) a boat", "2. (activation 1.25) a ship"]


@pytest.mark.parametrize("prompt", [None, "What is in these pictures?"])
def test_images_travel_as_data_urls_with_the_configured_prompt(stub, prompt):
    client, _ = make_client(stub)
    explainer = ai.OpenAIExplainer(client, **({} if prompt is None else {"image_prompt": prompt}))
    explainer.explain([ai.Example(PNG, 1.0), ai.Example(b"\xff\xd8 jpeg", 0.5)])
    content = stub.requests[0][2]["messages"][0]["content"]
    assert content[0]["text"] == (prompt or ai.IMAGE_PROMPT)
    urls = [p["image_url"]["url"] for p in content if p["type"] == "image_url"]
    assert urls[0] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert urls[1].startswith("data:image/jpeg;base64,")


def test_scorer_rates_in_batches(stub):
    client, _ = make_client(stub)
    scores = ai.OpenAIScorer(client, batch_size=3).similarity("about {boats}", ["a", "b", "c", PNG])
    assert scores.tolist() == [0.0, 1.0, 2.0, 0.0]
    prompts = [r[2]["messages"][0]["content"][0]["text"] for r in stub.requests]
    assert "described as: about {boats}" in prompts[0]
    assert "list of 3 numbers" in prompts[0]
    assert "list of 1 numbers" in prompts[1]


def test_embeddings_come_back_in_the_order_of_the_texts(stub):
    client, _ = make_client(stub)
    np.testing.assert_array_equal(client.embed(["abc", "d"]), [[3, 1], [1, 1]])
    assert stub.requests[0][2]["model"] == "vectors"
    scores = ai.EmbeddingScorer(client.embed).similarity("abc", ["xyz", "y"])
    assert scores[0] == pytest.approx(1.0)


def test_whole_protocol_over_http(stub):
    client, _ = make_client(stub)
    rng = np.random.default_rng(0)
    atom, coefficient = np.zeros((60, 1), np.int32), rng.random((60, 1)).astype(np.float32)
    selected = ai.select_samples(lambda: [(atom, coefficient)], 1, n_next=10, n_random=10)
    texts = [f"text {i}" for i in range(60)]
    result = ai.autointerpret(selected, texts, ai.OpenAIExplainer(client), ai.OpenAIScorer(client))
    assert result.interpretations[0].explanation == "They all mention boats."
    assert result.interpretations[0].n_scored == 20
    assert -1 <= result.mean_score <= 1


@pytest.mark.parametrize("own", [True, False])
def test_settings_come_from_the_environment(stub, monkeypatch, own):
    monkeypatch.setenv("OPENAI_BASE_URL", stub.url if not own else "http://127.0.0.1:9/wrong")
    monkeypatch.setenv("OPENAI_API_KEY", "general")
    monkeypatch.setenv("OPENAI_MODEL", "general-model")
    if own:
        monkeypatch.setenv("DBKSVD_OPENAI_BASE_URL", stub.url + "/")
        monkeypatch.setenv("DBKSVD_OPENAI_API_KEY", "own")
        monkeypatch.setenv("DBKSVD_OPENAI_MODEL", "own-model")
    client = ai.OpenAIClient()
    ai.OpenAIExplainer(client).explain([ai.Example("x", 1.0)])
    path, headers, body = stub.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == ("Bearer own" if own else "Bearer general")
    assert body["model"] == ("own-model" if own else "general-model")


def test_without_a_key_no_header_is_sent(stub):
    client = ai.OpenAIClient(stub.url, "m")
    ai.OpenAIExplainer(client).explain([ai.Example("x", 1.0)])
    assert "Authorization" not in stub.requests[0][1]


def test_busy_answers_are_tried_again_and_the_wait_is_the_servers(stub):
    stub.queue = [(503, {}, b"busy"), (429, {"Retry-After": "7"}, b"slow down"), (500, {}, b"oops")]
    client, waits = make_client(stub, backoff=0.5)
    assert ai.OpenAIExplainer(client).explain([ai.Example("x", 1.0)]) == "They all mention boats."
    assert waits == [0.5, 7.0, 2.0]
    assert len(stub.requests) == 4


def test_retries_are_bounded(stub):
    stub.queue = [(503, {}, b"busy")] * 9
    client, waits = make_client(stub, max_retries=2)
    with pytest.raises(JobError, match=r"chat/completions failed 3 times, the last time with status 503: busy"):
        ai.OpenAIExplainer(client).explain([ai.Example("x", 1.0)])
    assert len(stub.requests) == 3
    assert waits == [1.0, 2.0]


def test_a_long_wait_is_cut(stub):
    stub.queue = [(429, {"Retry-After": "86400"}, b"")]
    client, waits = make_client(stub)
    client.embed(["x"])
    assert waits == [60.0]


def test_a_refusal_is_not_tried_again_and_the_key_is_not_shown(stub):
    stub.queue = [(401, {}, b'{"error": "bad key"}')]
    client, waits = make_client(stub)
    with pytest.raises(JobError, match=r'refused the request with status 401: \{"error": "bad key"\}') as caught:
        client.embed(["x"])
    assert waits == []
    assert "secret-key" not in str(caught.value) + repr(client)


def test_a_redirect_is_not_followed(stub):
    stub.queue = [(302, {"Location": stub.url.replace("/v1", "/elsewhere")}, b"")]
    client, _ = make_client(stub)
    with pytest.raises(JobError, match="status 302"):
        client.embed(["x"])
    assert len(stub.requests) == 1


def test_a_server_that_is_not_there_is_named_after_bounded_retries(stub):
    stub.close()
    client, waits = make_client(stub, max_retries=1)
    with pytest.raises(JobError, match=r"embeddings failed 2 times, .*refused"):
        client.embed(["x"])
    assert len(waits) == 1
    stub.server = stub.thread = None
    stub.close = lambda: None


def test_a_silent_server_runs_into_the_timeout(stub, monkeypatch):
    answer_now = threading.Event()
    monkeypatch.setattr(stub, "rule", lambda path, body: answer_now.wait(PATIENCE) and {})
    client, _ = make_client(stub, max_retries=0, timeout=0.2)
    try:
        with pytest.raises(JobError, match=r"failed 1 times, .*timed out"):
            client.embed(["x"])
    finally:
        answer_now.set()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>", "not JSON"),
        ({"choices": []}, "without choices"),
        ({"choices": [{"message": {"content": " "}}]}, "empty message"),
        ({"choices": [{"message": {"content": None}}]}, "empty message"),
    ],
)
def test_answers_off_the_protocol_are_refused(stub, answer, message):
    stub.queue = [(200, {}, answer)]
    client, _ = make_client(stub)
    with pytest.raises(JobError, match=message):
        ai.OpenAIExplainer(client).explain([ai.Example("x", 1.0)])


@pytest.mark.parametrize("answer", [{"data": [{"index": 0, "embedding": [1.0]}]}, {"data": 3}, {}])
def test_embeddings_off_the_protocol_are_refused(stub, answer):
    stub.queue = [(200, {}, answer)]
    client, _ = make_client(stub)
    with pytest.raises(JobError, match=r"gave 1 embeddings for 2 texts|without data\[\].embedding"):
        client.embed(["x", "y"])


@pytest.mark.parametrize("text", ["no idea", "[1, 2]", "[1, null, 3]", '["a", "b", "c"]'])
def test_ratings_of_the_wrong_form_are_refused(stub, text):
    stub.queue = [(200, {}, {"choices": [{"message": {"content": text}}]})]
    client, _ = make_client(stub)
    with pytest.raises(JobError, match="asked for 3 ratings, received"):
        ai.OpenAIScorer(client).similarity("e", ["a", "b", "c"])


def test_missing_settings_say_what_to_type(stub):
    with pytest.raises(InputError, match="export DBKSVD_OPENAI_BASE_URL="):
        ai.OpenAIClient()
    with pytest.raises(InputError, match="is not an http or https address"):
        ai.OpenAIClient("file:///etc/passwd")
    with pytest.raises(InputError, match="export DBKSVD_OPENAI_MODEL="):
        ai.OpenAIClient(stub.url).chat([])
    with pytest.raises(InputError, match="export DBKSVD_OPENAI_EMBEDDING_MODEL="):
        ai.OpenAIClient(stub.url).embed(["x"])
    client, _ = make_client(stub)
    with pytest.raises(InputError, match="the atom is active on no sample"):
        ai.OpenAIExplainer(client).explain([])
    with pytest.raises(InputError, match="pass the bytes of a PNG"):
        ai.OpenAIExplainer(client).explain([ai.Example(b"not an image", 1.0)])
