"""What OpenAI's clients send, and what must come back: asked of our own server, and of vLLM's with our plugin.

Greedy answers are compared with OpenAI's formulas, computed here token by token. Both servers have the bundled
model and the chat template below. Where vLLM answers otherwise, the request itself says how, and why.
"""

from __future__ import annotations

import functools
import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

NAME = "builtin"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PROMPT, ANSWER = "red-fox: 31425\nold-oak: 27182\nred-fox: ", "31425"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHATTED = {"messages": [{"role": "user", "content": PROMPT}]}
END = 1  # the token with which the model ends its answers

# What an answer is compared with. formula: texts, reasons, usage. seed: the same seed gives the same text, another one
# another text. choices: as many as n. log-probabilities, echo: the formula, and these.
Expected = Literal["formula", "seed", "choices", "log-probabilities", "echo", "error"]


class VLLM(NamedTuple):
    """What vLLM answers where that is something else, and the reason."""

    why: str
    expected: Expected = "formula"
    status: int = 400  # of an error


class Case(NamedTuple):
    """A request: its path, its fields (or its whole body, as bytes), and what must come back.

    status, param: of an error, the second one what ours names. vllm: None if vLLM answers in the same way.
    """

    path: str
    fields: dict[str, Any] | bytes
    expected: Expected = "formula"
    status: int = 400
    param: str | None = None
    vllm: VLLM | None = None


def _both(fields: dict[str, Any], *args: Any, **options: Any) -> list[Case]:
    """The same fields with a prompt and with a chat."""
    greedy = {"max_tokens": 6, "temperature": 0}
    return [Case(path, {**greedy, **of, **fields}, *args, **options) for path, of in
            ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, CHATTED))]  # fmt: skip


def _completion(fields: dict[str, Any], *args: Any, **options: Any) -> list[Case]:
    return _both(fields, *args, **options)[:1]


def _chat(fields: dict[str, Any], *args: Any, **options: Any) -> list[Case]:
    return _both(fields, *args, **options)[1:]


IGNORED = VLLM("fields that it does not know are ignored")
OWN_FIELD = VLLM("the field is one of ours, and ignored")
CASES = [
    # lengths
    *_both({}), *_both({"max_tokens": 1}), *_both({"max_tokens": 20}), *_chat({"max_completion_tokens": 3}),
    *_both({"max_tokens": -1}, "error", param="max_tokens"), *_both({"max_tokens": "six"}, "error", param="max_tokens"),
    # forms of the prompt
    *_completion({"prompt": [5, 6, 7, 300, 9]}), *_completion({"prompt": [PROMPT, "a record"]}),
    *_completion({"prompt": [[5, 6, 7], [300, 9, 11, 12]]}), *_completion({"prompt": [2048]}, "error", param="prompt"),
    *_completion({"prompt": []}, "error", param="prompt"), *_completion({"prompt": None}, "error", param="prompt"),
    *_completion({"prompt": [5] * 9000}, "error"),
    *_chat({"messages": [{"role": "system", "content": PROMPT[:15]}, {"role": "user", "content": PROMPT[15:]}]}),
    *_chat({"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]}),
    *_chat({"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "314"},
                         {"role": "user", "content": "old-oak: "}]}),
    *_chat({"messages": None}, "error", param="messages"),
    # penalties and biases
    *(case for value in (0.1, 0.5, 1, 2, -2) for case in _both({"frequency_penalty": value})),
    *_both({"presence_penalty": 2}), *_both({"presence_penalty": -1}),
    *_both({"frequency_penalty": 1, "presence_penalty": 0.5, "max_tokens": 12}),
    *_both({"frequency_penalty": 3}, "error", param="frequency_penalty"),
    *_both({"logit_bias": {"321": 100}}), *_both({"logit_bias": {"321": 3, "7": -100.0}}), *_both({"logit_bias": {}}),
    *_both({"logit_bias": {"2048": 1}}, "error", param="logit_bias"),
    # what ends an answer
    *(case for stop in ("4", "142", ["25", "1"], ["never there", "3"], "\n", ["never there"], [])
      for case in _both({"stop": stop, "max_tokens": 20})),
    *_both({"logit_bias": {str(END): 100}}), *_both({"logit_bias": {str(END): 100}, "max_tokens": 1}),
    # sampling
    *_both({"temperature": 1.5, "seed": 5, "max_tokens": 16}, "seed"),
    *_both({"temperature": 1, "top_p": 1e-4}),  # which leaves one token
    *_both({"temperature": "hot"}, "error", param="temperature"),
    *_both({"temperature": -1}, "error", param="temperature"),
    *_both({"temperature": 3}, "error", param="temperature"),
    *_both({"top_p": 1.5}, "error", param="top_p"), *_both({"seed": "five"}, "error", param="seed"),
    # several answers, and what is known of them
    *_both({"n": 1}),
    *_both({"n": 2, "temperature": 1, "seed": 5}, "error", param="n",
           vllm=VLLM("it answers a prompt several times", "choices")),
    *_completion({"logprobs": 1}, "error", param="logprobs",
                 vllm=VLLM("it has log-probabilities", "log-probabilities")),
    *_chat({"logprobs": True, "top_logprobs": 2}, "error", param="logprobs",
           vllm=VLLM("it has log-probabilities", "log-probabilities")),
    *_completion({"echo": True}, "error", param="echo", vllm=VLLM("it repeats the prompt", "echo")),
    *_completion({"suffix": "z"}, "error", param="suffix"),
    # fields that change nothing, and fields that nobody knows
    *_both({"user": "u", "stop": None, "seed": None, "logit_bias": None, "stream": None}),
    *_both({"store": True, "metadata": {"a": "b"}, "service_tier": "auto"}),
    *_both({"colour": 1}, "error", param="colour", vllm=IGNORED),
    *_both({"generation_config": {"max_new_tokens": 9}}, vllm=OWN_FIELD),  # the request's own max_tokens come first
    *_both({"generation_config": {"num_beams": 0}}, "error", param="generation_config", vllm=OWN_FIELD),
    # bodies
    *_both({"model": "gpt-4"}, "error", status=404), *_both({"stream": "perhaps"}, "error", param="stream"),
    *(Case(path, body, "error") for path in (COMPLETIONS, CHAT) for body in (b"{nonsense", b"[1]", b"", b"{}")),
    Case("/v1/nonsense", b"{}", "error", 404),
]  # fmt: skip


def describe(case: Case) -> str:
    """What tells a case from the others in a list of tests."""
    told = case.fields if isinstance(case.fields, bytes) else {
        name: value for name, value in case.fields.items()
        if (name, value) not in (("max_tokens", 6), ("temperature", 0), ("prompt", PROMPT), *CHATTED.items())
    }  # fmt: skip
    return f"{case.path[4:]} {told}"[:70]


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens."""

    host: str
    port: int

    def send(self, path: str, body: Any = None, headers: Any = None, method: str = "") -> http.client.HTTPResponse:
        """Send a request, and return its response, unread. body: bytes, or an object that becomes JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | (headers or {})
        connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
        return connection.getresponse()

    def request(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; without a body a GET."""
        answer = self.send(path, body)
        return answer.status, json.loads(answer.read())

    def events(self, path: str, body: Any) -> list[str]:
        """The events of a stream, as they are written."""
        answer = self.send(path, {**body, "stream": True})
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        return answer.read().decode().split("\n\n")[:-1]


class Choice(NamedTuple):
    """One answer: its text, why it ended, and the log-probabilities of its tokens, or None."""

    text: str
    reason: str
    scores: list[float] | None = None


class Answers(NamedTuple):
    """The answers to a request, by their index, and its usage: tokens of the prompts and of the answers."""

    choices: list[Choice]
    usage: tuple[int, int]


class Formula:
    """The greedy answers of a model by OpenAI's formulas: one token after another, without any cache."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.logits = functools.cache(self._logits)

    @torch.no_grad()
    def _logits(self, *ids: int) -> torch.Tensor:
        """The logits of the token after these: many requests have a beginning in common."""
        logits: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        return logits

    def prompts(self, path: str, fields: dict[str, Any]) -> list[list[int]]:
        """The tokens of a request's prompts. The chat template adds none for the beginning of a text."""
        if path == CHAT:
            parts = [message["content"] for message in fields["messages"]]
            text = "".join(part if isinstance(part, str) else part[0]["text"] for part in parts)
            return [self.tokenizer(text, add_special_tokens=False).input_ids]
        given = fields["prompt"]
        several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        return [self.tokenizer(one).input_ids if isinstance(one, str) else one for one in several]

    def tokens(
        self, ids: Sequence[int], new: int, frequency: float = 0, presence: float = 0, bias: Any = ()
    ) -> tuple[list[int], list[float]]:
        """Tokens by OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence, and bias[j] on top.

        c[j] is how often token j was sampled before. With them their log-probabilities by mu alone.
        """
        sampled, scores = list[int](), list[float]()
        for _ in range(new):
            logits = self.logits(*ids, *sampled).clone()
            probabilities = logits.log_softmax(0)
            for token in set(sampled):
                logits[token] -= sampled.count(token) * frequency + presence
            for token, value in dict(bias).items():
                logits[int(token)] += value
            sampled.append(int(logits.argmax()))
            scores.append(float(probabilities[sampled[-1]]))
            if sampled[-1] == END:
                break
        return sampled, scores

    def answer(self, path: str, fields: dict[str, Any]) -> Answers:
        """What must come back for a request."""
        given = {name: value for name, value in fields.items() if value is not None}
        new = given.get("max_completion_tokens", given["max_tokens"])
        penalties = given.get("frequency_penalty", 0), given.get("presence_penalty", 0), given.get("logit_bias", {})
        stops = given.get("stop", [])
        prompts, choices, count = self.prompts(path, fields), [], 0
        for ids in prompts:
            tokens, scores = self.tokens(ids, new, *penalties)
            texts = [self.text(tokens[:n]) for n in range(1, len(tokens) + 1)]
            text, reason = texts[-1], "stop" if tokens[-1] == END else "length"
            for n, each in enumerate(texts, 1):
                places = [each.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in each]
                if places:
                    text, reason, tokens = each[: min(places)], "stop", tokens[:n]
                    break
            choices.append(Choice(text, reason, scores[: len(tokens)]))
            count += len(tokens)
        return Answers(choices, (sum(map(len, prompts)), count))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def _whole(server: Endpoint, path: str, body: dict[str, Any]) -> Answers:
    """The answers as one object, which is checked for what every client needs of it."""
    status, answer = server.request(path, body)
    assert status == 200, answer
    assert answer["object"] == ("chat.completion" if path == CHAT else "text_completion")
    assert answer["model"] == NAME and answer["id"] and answer["created"] >= 0
    choices = []
    for index, choice in enumerate(sorted(answer["choices"], key=lambda one: one["index"])):
        assert choice["index"] == index
        text, known = choice["text"] if path == COMPLETIONS else choice["message"]["content"], choice["logprobs"]
        assert path == COMPLETIONS or choice["message"]["role"] == "assistant"
        scores = None
        if known is not None:
            scores = known["token_logprobs"] if path == COMPLETIONS else [one["logprob"] for one in known["content"]]
        choices.append(Choice(text or "", choice["finish_reason"], scores))
    return Answers(choices, _usage(answer))


def _streamed(server: Endpoint, path: str, body: dict[str, Any]) -> Answers:
    """The same from a stream, without log-probabilities."""
    events = server.events(path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[-1]["choices"] == []
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content")
        texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons  # nothing follows the end
            reasons[choice["index"]] = choice["finish_reason"]
    return Answers([Choice(texts[i], reasons[i]) for i in range(len(texts))], _usage(chunks[-1]))


def check(server: Endpoint, formula: Formula, case: Case, by_vllm: bool = False) -> None:
    """Send the request of a case, as a whole and as a stream, and assert that what comes back is what it says."""
    expected, status, path = case.expected, case.status, case.path
    if by_vllm and case.vllm is not None:
        expected, status = case.vllm.expected, case.vllm.status
    if isinstance(case.fields, bytes) or expected == "error":
        body = case.fields if isinstance(case.fields, bytes) else {"model": NAME, **case.fields}
        found, answer = server.request(path, body)
        assert found == status, answer
        if path in (COMPLETIONS, CHAT):
            error = answer["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["message"]
            assert by_vllm or case.param is None or error["param"] == case.param, error
        return
    fields = {"model": NAME, **case.fields}
    whole, streamed = _whole(server, path, fields), _streamed(server, path, fields)
    if expected == "choices":
        assert len(whole.choices) == len(streamed.choices) == fields["n"]
        return
    assert [one[:2] for one in streamed.choices] == [one[:2] for one in whole.choices]
    assert streamed.usage == whole.usage
    if expected == "seed":
        assert _whole(server, path, {**fields, "seed": fields["seed"] + 1}).choices != whole.choices
        return
    right = formula.answer(path, fields)
    texts = [one.text for one in right.choices]
    if expected == "echo":
        texts = [fields["prompt"] + text for text in texts]
    assert [one.text for one in whole.choices] == texts
    assert [one.reason for one in whole.choices] == [one.reason for one in right.choices]
    assert whole.usage == right.usage
    for one, other in zip(whole.choices, right.choices, strict=True):
        assert (one.scores is None) == (expected != "log-probabilities")
        if one.scores is not None and other.scores is not None:
            torch.testing.assert_close(one.scores, other.scores, rtol=1e-3, atol=1e-3)
