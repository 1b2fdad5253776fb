"""attach is for one user of a model at a time; a Cache belongs to its request, whatever else happens to the model."""

import copy
import threading

import pytest
import torch

import skimkv
from support.calls import in_thread
from support.generation import GREEDY, N
from support.refusals import refuses
from support.tiny_models import family, prompt

A, B = "LMInfinite(k=2, initial=1)", "H2O(k=3)"
ADVICE = "give each request its own skimkv.Cache"


@pytest.fixture
def model():
    """A model of the test's own: nobody else has attached anything, and no cache was made."""
    model = copy.deepcopy(family("llama"))
    skimkv.detach(model)
    return model


def tokens(model, **options):
    return model.generate(prompt(1, N), **GREEDY, **options).tolist()


def alone(spec):
    """What a request decodes that has the model to itself."""
    model = copy.deepcopy(family("llama"))
    return tokens(model, past_key_values=skimkv.Cache(model, spec))


def advises(error):
    assert isinstance(error, RuntimeError) and ADVICE in str(error) and "\n" not in str(error), repr(error)


class Paused:
    """A streamer that stops generate() after the prompt, until `go` is set."""

    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    def put(self, ids):
        self.started.set()
        assert self.go.wait(60)

    def end(self): ...


class Running:
    """A generate() in another thread, which waits after its prompt. As a context manager it ends, and is joined."""

    def __init__(self, model, **options):
        self.streamer, self.answers = Paused(), []
        self.generate, self.options = model.generate, options
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            answer = self.generate(prompt(1, N), streamer=self.streamer, **GREEDY, **self.options)
            self.answers.append(answer.tolist())
        except Exception as error:
            self.answers.append(error)

    def __enter__(self):
        self.thread.start()
        assert self.streamer.started.wait(60)
        return self

    def finish(self):
        self.streamer.go.set()
        self.thread.join(60)
        return self.answers[0]

    def __exit__(self, *exception):
        self.finish()


def test_contexts_nest_and_leaving_them_out_of_order_raises(model):
    clean = dict(model.__dict__)
    dense, a, b = tokens(model), alone(A), alone(B)
    assert dense != a != b != dense
    outer, inner = skimkv.attach(model, A), skimkv.attach(model, B)
    refuses(outer.__enter__, ADVICE, RuntimeError)
    skimkv.detach(model)
    with skimkv.attach(model, A) as outer:
        inner = skimkv.attach(model, B)
        inner.__enter__()
        assert tokens(model) == b
        refuses(lambda: outer.__exit__(None, None, None), ADVICE, RuntimeError)
        assert model.__dict__ == clean, "both are left"
        inner.__exit__(None, None, None)
        assert tokens(model) == dense
    with skimkv.attach(model, A):
        with skimkv.attach(model, B):
            assert tokens(model) == b
        assert tokens(model) == a
    assert model.__dict__ == clean


def test_an_attachment_that_was_left_cannot_be_entered_again(model):
    attached = skimkv.attach(model, A)
    with attached:
        pass
    with pytest.raises(RuntimeError, match="was left"), attached:
        pass


def test_an_error_in_the_block_is_not_replaced(model):
    def block():
        with skimkv.attach(model, A):
            skimkv.attach(model, B).__enter__()
            raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        block()
    skimkv.detach(model)


def test_other_threads_are_refused_while_a_with_is_open(model):
    a = alone(A)
    with skimkv.attach(model, A):
        advises(in_thread(lambda: skimkv.attach(model, B)))
        advises(in_thread(lambda: skimkv.detach(model)))
        assert in_thread(lambda: tokens(model)) == tokens(model) == a, "generate() may run in any thread"
        assert in_thread(lambda: tokens(model, past_key_values=skimkv.Cache(model, B))) == alone(B)


def test_other_threads_are_refused_while_generate_runs(model):
    dense, a = tokens(model), alone(A)
    skimkv.attach(model, A)
    prepared = in_thread(lambda: skimkv.attach(model, A))
    with Running(model) as running:
        for call in (lambda: skimkv.attach(model, B), lambda: skimkv.detach(model), prepared.__enter__):
            refuses(call, ADVICE, RuntimeError)
        assert running.finish() == a
    skimkv.detach(model)
    assert tokens(model) == dense


def test_leaving_while_a_generate_runs_that_started_inside(model):
    """The streaming idiom: the running generate() keeps its method, and the thread that leaves hears of it."""
    clean, dense, a = dict(model.__dict__), tokens(model), alone(A)
    attached = skimkv.attach(model, A)
    attached.__enter__()
    with Running(model) as running:
        refuses(lambda: attached.__exit__(None, None, None), ADVICE, RuntimeError)
        assert running.finish() == a
    assert model.__dict__ == clean, "the last generate() has undone the attachment"
    assert tokens(model) == dense


def test_a_generate_that_starts_too_late_raises(model):
    """Thread(target=model.generate) was written inside the block, and the thread begins after it."""
    dense = tokens(model)
    with skimkv.attach(model, A):
        generate = model.generate
    advises(in_thread(lambda: generate(prompt(1, N), **GREEDY)))
    assert tokens(model) == dense


def test_leaving_does_not_disturb_a_cache_of_another_thread(model):
    b = alone(B)
    for make_inside in (True, False):
        cache = None if make_inside else skimkv.Cache(model, B)
        attached = skimkv.attach(model, A)
        attached.__enter__()
        cache = cache or skimkv.Cache(model, B)
        with Running(model, past_key_values=cache) as running:
            attached.__exit__(None, None, None)
            assert running.finish() == b
        later = skimkv.Cache(model, B)
        with skimkv.attach(model, A):
            pass
        assert tokens(model, past_key_values=later) == b
        skimkv.detach(model)


@pytest.mark.slow
def test_eight_threads_with_a_cache_each_decode_what_they_decode_alone(model):
    specs = [A, B, "Dense()", "SparQ(r=4, k=8)", "TopK(k=4)", "SubGen(k=3, recent=4)", "H2O(k=10)", "LMInfinite(k=8)"]
    specs[-1] = "LMInfinite(k=8, initial=2)"
    expected, together, answers = [alone(spec) for spec in specs], threading.Barrier(8), [None] * 8

    def request(i):
        together.wait(60)
        answers[i] = [tokens(model, past_key_values=skimkv.Cache(model, specs[i])) for _ in range(3)]

    threads = [threading.Thread(target=request, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == [[tokens_alone] * 3 for tokens_alone in expected]
    skimkv.detach(model)
    with torch.no_grad():
        assert tokens(model) == tokens(family("llama"))
