"""What skimkv refuses in vLLM: one line in the main process, which names what is wrong, before weights are loaded."""

from __future__ import annotations

import pytest

from support import vllm_engines as engines

pytestmark = pytest.mark.skipif(not engines.INSTALLED, reason="vLLM is not installed: make test-vllm")

SPARQ = "SparQ(r=16, k=64)"
REFUSED = {
    "a spec that is wrong": ("SparQ(r=16)", {}, "SparQ needs a value for k"),
    "a name that is wrong": ("SparK(r=16)", {}, "unknown method 'SparK'; did you mean SparQ"),
    "too many channels": ("SparQ(r=65, k=64)", {}, "r = 65 must be at most 64"),
    "a method without a store in blocks": ("SnapKV(k=64)", {}, "SnapKV is not supported in blocks"),
    "a kernel that reads no blocks": ("Quest(k=64, page=16)", {}, "Quest(page=16, k=64) is not supported in blocks"),
    "a budget that is a share": ("H2O(k=0.2)", {}, "k = 0.2 is a share of the prompt"),
    "a budget without a kernel": ("TOVA(k=64)", {}, "TOVA(k=64) has no kernel"),
    "positions in the cache": ("StreamingLLM(k=64)", {}, "vLLM's attention layers do not have that rotation: use LMIn"),
    "the same as an option": (
        "LMInfinite(k=64, positions='cache')",
        {},
        "positions in the cache, so it turns its first",
    ),
    "blocks that are no budget": ("H2O(k=64)", {"block_size": 256}, "--block-size 256 must be 64"),
    "long prompts in pieces": ("H2O(k=64)", {"long_prefill_token_threshold": 64}, "--long-prefill-token-threshold 64"),
    "channels of K itself": (
        "SparQ(r=16, k=64, channels='none')",
        {},
        "channels = 'none' must be one of copy, int8, int4 in blocks",
    ),
    "a setting without a kernel": ("TopK(k=64, mean_value=True)", {}, "has no kernel"),
    "blocks of another size": (SPARQ, {"block_size": 128}, "--block-size 128 must be a multiple of 256"),
    "a cache in fp8": (SPARQ, {"kv_cache_dtype": "fp8"}, "a cache of fp8 is not supported"),
    "another backend": (SPARQ, {"attention_backend": "TRITON_ATTN"}, "the attention backend TRITON_ATTN is set"),
    "speculative decoding": (
        SPARQ,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative decoding is not supported",
    ),
    "a KV connector": (
        SPARQ,
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "KV connectors are not supported",
    ),
    "a worker of the user's": (SPARQ, {"worker_cls": "my.Worker"}, "worker_cls = 'my.Worker' is set"),
    "options that do not exist": ({"r": 16}, {}, "must have one text"),
}


def configure(model, method, changes):
    """Make the configuration of an engine, as its main process does; return the error, or what was configured."""
    from vllm.engine.arg_utils import EngineArgs

    options = method if isinstance(method, dict) else {"method": method}
    arguments = {"additional_config": {"skimkv": options}, "skip_tokenizer_init": True, "max_model_len": 2048}
    try:
        config = EngineArgs(model, **{**arguments, **changes}).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return config.cache_config.block_size, config.parallel_config.worker_cls


@pytest.fixture(scope="module")
def errors(model):
    """The error of every case, from one child."""
    return engines.in_child(lambda: {name: configure(model, case[0], case[1]) for name, case in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(errors, name):
    error = errors[name]
    assert isinstance(error, str), f"nothing was refused: {error}"
    assert error.startswith("ConfigurationError: skimkv in vLLM: ") and "\n" not in error
    assert REFUSED[name][2] in error


def test_what_is_not_refused_gets_blocks_of_1024_tokens_unless_told_otherwise(model):
    answers = engines.in_child(lambda: [configure(model, SPARQ, c) for c in ({}, {"block_size": 512})])
    assert answers == [(1024, "skimkv.vllm.worker.Worker"), (512, "skimkv.vllm.worker.Worker")]


@pytest.mark.parametrize(("method", "slots"), [("H2O(k=64)", 64), ("SubGen(k=100, recent=50)", 160)])
def test_a_block_has_the_budget_of_a_request(model, method, slots):
    assert engines.in_child(configure, model, method, {}) == (slots, "skimkv.vllm.worker.Worker")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sinks", object(), "attention sinks are not supported"),
        ("alibi_slopes", [1.0], "ALiBi is not supported"),
        ("sliding_window", 256, "a sliding window of 256 tokens is not supported"),
        ("attn_type", "encoder_only", "attention of type 'encoder_only' is not supported"),
        ("kv_sharing_target_layer_name", "layers.0", "sharing a cache between layers is not supported"),
    ],
)
def test_a_layer_is_refused_that_blocks_do_not_serve(name, value, message):
    from skimkv.vllm.options import ConfigurationError, refuse_layer

    layer = dict.fromkeys(("sinks", "alibi_slopes", "sliding_window", "kv_sharing_target_layer_name"))
    layer["attn_type"] = "decoder"
    refuse_layer(layer)
    with pytest.raises(ConfigurationError, match=message):
        refuse_layer({**layer, name: value})


def test_a_model_with_sliding_layers_does_not_start(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, sliding_window=256,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="a sliding window of 256 tokens is not supported"):
        engines.in_child(engines.engine, str(tmp_path), "SparQ(r=16, k=64)")


def test_a_vllm_that_moved_gets_one_line_with_the_versions(monkeypatch, caplog):
    import logging

    from vllm.v1.attention.backends import registry

    from skimkv.vllm import register

    monkeypatch.delattr(registry, "register_backend")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "register_backend" in line and line.endswith("it supports vLLM 0.32") and "\n" not in line


def test_a_configuration_that_moved_gets_one_line_with_the_versions(model):
    def configure_without(name):
        from vllm.config import CacheConfig

        from skimkv.vllm import plugin

        check = plugin.Options.check
        plugin.Options.check = lambda self: (check(self), delattr(self.vllm_config.cache_config, name))
        delattr(CacheConfig, name) if hasattr(CacheConfig, name) else None
        return configure(model, SPARQ, {})

    error = engines.in_child(configure_without, "user_specified_block_size")
    assert error.startswith("ConfigurationError: skimkv in vLLM: this version of vLLM differs")
    assert error.endswith("(skimkv supports vLLM 0.32)") and "\n" not in error
