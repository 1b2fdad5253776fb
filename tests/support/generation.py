"""Ways to generate text with a model and a cache, which several test files compare.

A mode is a function mode(model, make_cache) that returns the tokens; make_cache() returns the cache to use, or None.
"""

import copy

import torch

from support.tiny_models import padded, prompt

N = 24  # tokens of a prompt
NEW = 20  # tokens that are generated
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
BATCH_CHANGES = {  # the rows of a cache of three that are its rows after a change
    (2, 0, 0): lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    (0, 0, 1, 1, 2, 2): lambda cache: cache.batch_repeat_interleave(2),
    (1,): lambda cache: cache.batch_select_indices(torch.tensor([1])),
    (0, 2): lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
}


def draft_of(model):
    """An assistant that is often right and often wrong: the model with a little noise on its head."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    head = draft.get_output_embeddings().weight.data
    head += 0.1 * head.std() * torch.randn_like(head)
    return draft


def greedy(model, cache):
    return model.generate(prompt(1, N), past_key_values=cache(), **GREEDY)


def sampling(model, cache):
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 20, "num_return_sequences": 3}
    return model.generate(prompt(1, N), past_key_values=cache(), **options)


def padding(model, cache):
    return model.generate(**padded([N, 9, 17]), past_key_values=cache(), **GREEDY)


def beam(model, cache):
    options = {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    return model.generate(**padded([N, 13]), past_key_values=cache(), **options)


def assisted(model, cache):
    return model.generate(prompt(1, N), past_key_values=cache(), assistant_model=draft_of(model), **GREEDY)


def lookup(model, cache):
    ids = prompt(1, N // 2).repeat(1, 2)
    return model.generate(ids, past_key_values=cache(), prompt_lookup_num_tokens=4, **GREEDY)


def chunks(model, cache):
    """22 = 7 + 7 + 7 + 1: the last chunk looks like a decode step."""
    return model.generate(**padded([22, 12]), past_key_values=cache(), prefill_chunk_size=7, **GREEDY)


def conversation(model, cache):
    """Four turns on one cache, which has not seen the last token of an answer; two turns add no token of their own."""
    past, text = cache(), prompt(1, N)
    for turn in (prompt(1, 9, 1), prompt(1, 1, 2), prompt(1, 0), prompt(1, 0)):
        text = torch.cat([model.generate(text, past_key_values=past, max_new_tokens=7, do_sample=False), turn], 1)
    return text


@torch.no_grad()
def forward(model, cache):
    """Without generate(): two padded blocks, then single tokens through forward; returns the order of the logits."""
    batch, past = padded([N, 15]), cache()
    mask, logits = batch["attention_mask"], []
    for block in batch["input_ids"].split([6, N - 10, 1, 1, 1, 1], 1):
        seen = past.get_seq_length() + block.shape[1]
        places = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -block.shape[1] :]
        out = model(block, attention_mask=mask[:, :seen], position_ids=places, past_key_values=past, use_cache=True)
        logits.append(out.logits[:, -1])
    return torch.stack(logits[1:]).argsort(-1)[..., -3:]


MODES = [greedy, sampling, padding, beam, assisted, lookup, chunks, conversation, forward]
