"""GGUF files: what is loaded equals the dequantised weights, and damage is named."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

import skimkv
from skimkv.hf.gguf_model import load_gguf, load_gguf_model
from skimkv.hf.matrix_modules import MatrixEmbedding, MatrixLinear
from skimkv.ops import block_weights
from support import gguf_files
from support.gguf_files import Kind, close, logits, near, tiny, write
from support.refusals import refuses

STRING = gguf.GGUFValueType.STRING
IDS = torch.arange(2, 42)[None] * 7 % 257
GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gguf_equals_its_dequantised_weights(tmp_path, backend, tied, bias):
    model = tiny(tied, attention_bias=bias)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_()
    reference = write(tmp_path / "m.gguf", model)
    loaded, tokenizer = load_gguf(tmp_path / "m.gguf", torch.float32)
    assert close(logits(loaded, IDS), logits(reference, IDS))
    assert torch.equal(loaded.generate(IDS, **GREEDY), reference.generate(IDS, **GREEDY))
    assert not loaded.training and all(not p.requires_grad for p in loaded.parameters())
    assert isinstance(loaded.model.embed_tokens, MatrixEmbedding) and isinstance(loaded.lm_head, MatrixLinear)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert tokenizer.decode(tokenizer("the Cat in the hat").input_ids) == "the Cat in the hat"
    assert tokenizer("the").input_ids == [gguf_files.VOCABULARY.index("the")]
    assert loaded.generation_config.eos_token_id == [1]


def test_gguf_in_bfloat16_by_default_and_with_a_sparse_method(tmp_path):
    reference = write(tmp_path / "m.gguf", tiny())
    loaded, _ = load_gguf(tmp_path / "m.gguf")
    assert loaded.dtype == torch.bfloat16 and loaded.lm_head(torch.ones(1, 96).bfloat16()).dtype == torch.bfloat16
    assert near(logits(loaded, IDS), logits(reference, IDS))
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    with skimkv.attach(reference, "SparQ(r=8, k=16)"), skimkv.attach(loaded, "SparQ(r=8, k=16)"):
        assert torch.equal(loaded.generate(IDS, **GREEDY), reference.generate(IDS, **GREEDY))


def test_gguf_other_float_types_and_one_head_each(tmp_path):
    kinds = {
        "output": Kind.F16,
        "token_embd": Kind.F32,
        "blk.1.attn_q": Kind.F16,
        "blk.0.ffn_up": Kind.F32,
        "blk.1.ffn_up": Kind.BF16,
    }
    reference = write(tmp_path / "m.gguf", tiny(num_key_value_heads=6), kinds)
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    assert type(loaded.model.embed_tokens) is torch.nn.Embedding
    assert loaded.lm_head.weight.dtype == torch.float16, "as it stands in the file"
    assert loaded.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert close(logits(loaded, IDS), logits(reference, IDS))


# Beside blocks inputs are rounded to 15 bits, and codes with their minima are several times the weights.
ROUNDED = 1e-2
MIXTURE = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output": Kind.Q6_K, "token_embd": Kind.Q6_K}


def mixture(model, most: Kind, others: dict[str, Kind]) -> dict[str, Kind]:
    """The types of all matrices as llama.cpp mixes them: `most`, but for some parts."""
    layers = range(model.config.num_hidden_layers)
    parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    kinds = {f"blk.{i}.{part}": others.get(part, most) for i in layers for part in parts}
    return kinds | {name: others.get(name, most) for name in ("output", "token_embd")}


def with_errors(model, ids):
    """The logits of a model whose linear layers err as our products of rounded inputs may, by 2^-13 of the spread."""
    torch.manual_seed(5)
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [
        part.register_forward_hook(lambda *x: x[2] + 2.0**-13 * x[2].std() * torch.randn(x[2].shape)) for part in linear
    ]
    try:
        return logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("type", block_weights.TYPES)
def test_mixtures_of_blocks(tmp_path, backend, type):
    """Files such as llama.cpp's Q4_K_M: the blocks are used as they stand in the file."""
    most, tied = Kind[type], block_weights.TYPES.index(type) % 2 == 0
    model = gguf_files.of_family("llama", tied)
    reference = write(tmp_path / "m.gguf", model, mixture(model, most, MIXTURE))
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    assert isinstance(loaded.model.embed_tokens, MatrixEmbedding) and isinstance(loaded.lm_head, MatrixLinear)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for ids in (IDS, IDS[:, :3]):
        exact = logits(reference, ids)
        moved = (with_errors(reference, ids) - exact).abs().max()
        assert (logits(loaded, ids) - exact).abs().max() <= max(ROUNDED * exact.std(), 2 * moved)
    assert torch.equal(loaded.generate(IDS, **GREEDY), reference.generate(IDS, **GREEDY))


@pytest.mark.parametrize("type", ["IQ2_XXS", "IQ3_S", "TQ2_0"])
def test_blocks_without_a_kernel_become_8_bit_weights_and_a_line_says_so(tmp_path, backend, type):
    model = gguf_files.of_family("llama")
    reference = write(tmp_path / "m.gguf", model, mixture(model, Kind[type], MIXTURE))
    with pytest.warns(UserWarning, match=rf"^{tmp_path}/m.gguf: no kernel reads {type}: matrices .* held in 8 bits$"):
        loaded = load_gguf_model(tmp_path / "m.gguf", torch.float32)
    assert loaded.model.layers[0].mlp.up_proj.kind == "packed" and loaded.lm_head.kind == "Q6_K"
    assert near(logits(loaded, IDS), logits(reference, IDS))


def split(path, model, edit=lambda part, writer: None):
    """Write the model in three parts, as llama.cpp's gguf-split does, and return the first one."""
    reference = write(path / "m.gguf", model)
    reader = gguf.GGUFReader(path / "m.gguf")
    for part in range(3):
        name = path / f"m-{part + 1:05}-of-00003.gguf"
        w = (
            gguf_files.header(name, model.config, model.config.model_type)
            if part == 0
            else gguf.GGUFWriter(name, "llama")
        )
        w.add_uint16("split.no", part)
        w.add_uint16("split.count", 3)
        for tensor in reader.tensors[part::3]:
            w.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        edit(part, w)
        gguf_files.finish(w)
    return reference


def test_a_model_in_several_files(tmp_path):
    reference = split(tmp_path, tiny())
    loaded, _ = load_gguf(tmp_path / "m-00001-of-00003.gguf", torch.float32)
    assert close(logits(loaded, IDS), logits(reference, IDS))
    with pytest.raises(ValueError, match="it is part 2 of a model: give the first part"):
        load_gguf(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "first.gguf")
    with pytest.raises(ValueError, match=r"first of 3 parts, so its name must end in -00001-of-00003.gguf"):
        load_gguf(tmp_path / "first.gguf")
    (tmp_path / "first.gguf").rename(tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ValueError, match=r"m-00003-of-00003\.gguf is missing, part 3 of 3"):
        load_gguf(tmp_path / "m-00001-of-00003.gguf")


def test_gguf_rope(tmp_path):
    """A base, and Llama 3.1's factors per pair of channels; other scalings are in test_gguf_metadata.py."""
    slower = np.linspace(1, 8, 8, dtype=np.float32)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    reference = write(tmp_path / "m.gguf", tiny(rope_parameters=rope), edit=tensor("rope_freqs.weight", slower))
    before = logits(reference, IDS)
    reference.model.rotary_emb.inv_freq /= torch.from_numpy(slower)
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    assert close(logits(loaded, IDS), logits(reference, IDS)) and not close(logits(loaded, IDS), before, 0.05)


def tensor(name, array, **options):
    """An edit of a file that adds a tensor."""
    return lambda writer: writer.add_tensor(name, array, **options)


def configured(**changes):
    """A model whose configuration, and so the metadata of its file, says something else than its tensors."""
    model = tiny()
    vars(model.config).update(changes)
    return model


def without_a_matrix():
    model = tiny()
    model.model.layers[1].mlp.up_proj.weight = None
    return model


def key(name, value, kind):
    return lambda writer: writer.add_key_value(name, value, kind)


def moved_by_a_byte(content):
    """The file with another offset of a vector: after its name come a count, a size and a type."""
    at = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8 + 4
    return content[:at] + bytes([content[at] + 1]) + content[at + 1 :]


Q8_K = tensor("blk.0.ffn_gate.scale", np.zeros((96, 292), np.uint8), raw_dtype=Kind.Q8_K)
# The file of a model, with an edit, or what becomes of its bytes; and the reason of the refusal.
DAMAGED = [
    (lambda content: content[:-500], "truncated"),
    (lambda content: content[:200], "truncated or damaged"),
    (lambda content: b"GGML" + content[4:], "not a GGUF file"),
    (lambda content: b"", "truncated or damaged"),
    (lambda content: content[:4] + bytes(3) + b"\3" + content[8:], "it is a big-endian GGUF file"),
    (lambda content: content[:4] + bytes(4) + content[8:], "GGUF version 0 is not supported; only 2 and 3 are"),
    (
        (tiny, key("general.architecture", "plamo", STRING)),
        "architecture 'plamo' is not supported; llama, mistral, qwe",
    ),
    ((tiny, key("llama.block_count", "two", STRING)), "llama.block_count = 'two' must be a whole number"),
    ((tiny, lambda writer: writer.add_expert_count(8)), "llama.expert_count = 8 is not supported; only 0 is"),
    (
        (tiny, tensor("blk.0.ffn_up_exps.weight", np.zeros((2, 160, 96), np.float32))),
        "blk.0.ffn_up_exps.weight has no p",
    ),
    ((tiny, Q8_K), "blk.0.ffn_gate.scale is of type Q8_K, which the package gguf does not dequantise"),
    (
        (tiny, tensor("blk.0.attn_sinks.weight", np.zeros(6, np.float32))),
        "blk.0.attn_sinks.weight has no place in this",
    ),
    ((tiny, tensor("blk.0.scale.weight", np.float32(1).reshape(()))), "blk.0.scale.weight has 0 dimensions"),
    ((without_a_matrix, None), "1 tensors are missing, the first is model.layers.1.mlp.up_proj.weight"),
    (
        (lambda: configured(intermediate_size=192), None),
        r"ffn_gate.weight is \(160, 96\); the metadata say \(192, 96\)",
    ),
    ((lambda: configured(hidden_size=6 * 2**29), None), r"token_embd.weight is \(263, 96\); .* \(263, 3221225472\)"),
    (
        (tiny, key("tokenizer.ggml.padding_token_id", 263, gguf.GGUFValueType.UINT32)),
        "tokenizer.ggml.padding_token_id = 263 is no token; there are 263",
    ),
    ((tiny, key("general.alignment", 0, gguf.GGUFValueType.UINT32)), "general.alignment = 0 must be a power of two"),
    ((tiny, key("general.alignment", 48, gguf.GGUFValueType.UINT32)), "general.alignment = 48 must be a power of two"),
    ((tiny, key("general.alignment", True, gguf.GGUFValueType.BOOL)), "general.alignment = True must be a power of"),
    (
        lambda content: content.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"),
        "damaged: two tensors have the name blk.0.ffn_up.weight",
    ),
    (moved_by_a_byte, r"damaged: blk.0.attn_norm.weight begins at byte \d+ of the data, no multiple of 32"),
    ((lambda: configured(hidden_size=0), None), "llama.embedding_length = 0 must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGED, ids=[reason for _, reason in DAMAGED])
def test_gguf_refusals_are_one_line_with_the_path(tmp_path, damage, reason):
    path = tmp_path / "m.gguf"
    model, edit = damage if isinstance(damage, tuple) else (tiny, None)
    write(path, model(), edit=edit)
    if not isinstance(damage, tuple):
        path.write_bytes(damage(path.read_bytes()))
    refuses(lambda: load_gguf(path), f"{path}.*{reason}")


def test_a_big_endian_file_is_refused_by_its_kind(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.finish(gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG))
    refuses(
        lambda: load_gguf(path), f"{path}: it is a big-endian GGUF file, which is not supported; only little-endian"
    )


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tmp_path):
    """Its last token would be looked up past the table. Fewer tokens than rows are padding."""
    path = tmp_path / "m.gguf"

    def with_tokens(n):
        def edit(writer):
            for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
                del writer.kv_data[0][key]
            gguf_files.add_tokenizer(writer, n)

        return edit

    rows = tiny().config.vocab_size
    write(path, tiny(), edit=with_tokens(rows + 2))
    refuses(
        lambda: load_gguf(path),
        f"^{path}: its tokenizer has {rows + 2} tokens; token_embd.weight has only {rows} rows$",
    )
    assert load_gguf_model(path).config.vocab_size == rows
    write(path, tiny(), edit=with_tokens(rows - 2))
    assert len(load_gguf(path)[1]) == rows - 2


def test_a_damaged_byte_is_refused_or_harmless(tmp_path):
    """Whatever one byte of the header becomes: a model, or one line with the path."""
    path = tmp_path / "m.gguf"
    write(path, tiny())
    whole, draw = path.read_bytes(), np.random.default_rng(0)
    refused = []
    vocabulary = whole.index(b"tokenizer.ggml.tokens")
    for at in draw.choice(vocabulary, 60, replace=False):
        path.write_bytes(whole[:at] + bytes([draw.integers(256)]) + whole[at + 1 :])
        try:
            load_gguf(path)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 10 and all(str(path) in line and "\n" not in line for line in refused)


def test_damaged_metadata_is_refused_or_harmless(tmp_path):
    """Whatever one value of the metadata becomes, and of whatever type: a model, or one line with the path."""
    path, draw, refused = tmp_path / "m.gguf", np.random.default_rng(0), []
    kinds = gguf.GGUFValueType
    values = [
        (2**63, kinds.UINT64), (6 * 2**58, kinds.UINT64), (-1, kinds.INT64), (1e300, kinds.FLOAT64), (0, kinds.UINT32),
        (float("nan"), kinds.FLOAT64), ("x", kinds.STRING), (True, kinds.BOOL),
    ]  # fmt: skip
    keys = [
        "llama.embedding_length", "llama.block_count", "llama.attention.head_count", "llama.attention.head_count_kv",
        "llama.attention.key_length", "llama.feed_forward_length", "llama.context_length", "llama.rope.freq_base",
        "llama.attention.layer_norm_rms_epsilon", "llama.rope.dimension_count", "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.tokens", "general.alignment", "general.architecture",
    ]  # fmt: skip
    for _ in range(40):
        key, (value, kind) = keys[draw.integers(len(keys))], values[draw.integers(len(values))]

        def edit(writer, key=key, value=value, kind=kind):
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)

        write(path, tiny(), edit=edit)
        try:
            load_gguf(path)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 10 and all(str(path) in line and "\n" not in line for line in refused)


def test_lists_in_lists_end(tmp_path):
    """A list that is nested thousands of times is one line, and no error of recursion."""
    path = tmp_path / "nested.gguf"
    metadata = b"\1\0\0\0\0\0\0\0a" + b"\x09\0\0\0" + (b"\x09\0\0\0" + b"\1\0\0\0\0\0\0\0") * 3000
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(8) + b"\1\0\0\0\0\0\0\0" + metadata)
    with pytest.raises(ValueError, match=r"nested\.gguf: damaged: lists of metadata are nested more than 8 deep"):
        load_gguf(path)
