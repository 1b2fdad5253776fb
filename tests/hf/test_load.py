"""Loading: a model and its tokenizer, or one line that names the path and the reason."""

import json
import random
import subprocess
import sys
import time
import types
import warnings

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import skimkv
from skimkv.hf import load as loading
from skimkv.hf.load import BUILTIN, Source, check_dtype, check_source
from support.refusals import refuses
from support.tiny_models import family, prompt, tokenizer


@pytest.fixture
def folder(tmp_path):
    family("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refused(path, reason, call=skimkv.load):
    with pytest.raises(ValueError, match=reason) as caught:
        call(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def refused_at_the_door(path, reason):
    """By load, and by check_source, which imports nothing heavy."""
    refused(path, reason)
    refused(path, reason, check_source)


@torch.no_grad()
def test_a_folder(folder):
    model, words = skimkv.load(folder, fast=False)
    assert not model.training
    assert torch.equal(model(prompt()).logits, AutoModelForCausalLM.from_pretrained(folder)(prompt()).logits)
    assert words("w5 w9")["input_ids"] == [5, 9]
    assert skimkv.load(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16
    assert skimkv.load(folder, dtype=torch.float64)[0].dtype == torch.float64


def test_names_of_number_formats(folder):
    names = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float32": "float32"}
    for name, full in names.items():
        assert check_dtype(name) == full
        assert skimkv.load(folder, dtype=name)[0].dtype == getattr(torch, full)
    assert check_dtype("auto") is None
    assert skimkv.load(folder, dtype="auto")[0].dtype == torch.float32


def test_builtin():
    model, words = skimkv.load("builtin", dtype=torch.float32)
    assert model.config.num_hidden_layers == 4
    ids = words("<s>torpid-kid: 24169\nlank-oak: 77310\ntorpid-kid: ", return_tensors="pt").input_ids
    with skimkv.attach(model, "SparQ(r=16, k=64)"):
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert words.decode(out[0, ids.shape[1] :]).startswith("24169")
    assert BUILTIN.is_dir()


def test_folders_without_a_model(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused_at_the_door(empty, "the folder is empty")
    (empty / "notes.txt").write_text("nothing")
    refused_at_the_door(empty, "no config.json")
    refused_at_the_door(folder / "config.json", "not a model folder")
    refused_at_the_door(folder / "none.gguf", "no such file")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    refused_at_the_door(folder, r"no weights \(\*.safetensors\)")
    torch.save(family("llama").state_dict(), folder / "pytorch_model.bin")
    refused_at_the_door(folder, "a pickle checkpoint, which can run code; only safetensors is read")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rope_parameters", {"rope_type": "yarn"}, "config.json: not a configuration: Missing required keys"),
        ("hidden_act", "foo", "cannot load its model: 'foo' was not found"),
        ("rms_norm_eps", None, "config.json: not a configuration: "),
    ],
)
def test_a_configuration_that_cannot_be_is_not_blamed_on_the_tokenizer(folder, name, value, reason):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    refused(folder, reason)


def test_truncated_and_corrupt_weights(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 64, b"\x10" + bytes(7) + b"{not json at all"):
        shard.write_bytes(damaged)
        refused(folder, f"{shard}.*truncated or corrupt")
    shard.unlink()
    refused(folder, shard.name)


def test_weights_that_are_missing_or_of_another_size(folder, tmp_path):
    """The library would fill what is missing with random numbers."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(folder, "lacks 9 weights, the first is model.layers.2")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    refused(folder, r"config.json leaves out layers of the checkpoint, the first weight is model\.layers\.1\.")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))
    refused(folder, r"lm_head.weight is \(97, 64\), by config.json it should be \(98, 64\)")


def test_other_weights_that_the_model_has_no_place_for_are_left_out(folder):
    """Those of another part, and those that an earlier version of the model stored in a layer."""
    more = {name: torch.zeros(2) for name in ("vision.layers.7.weight", "model.layers.0.rotary.inv_freq", "mtp.weight")}
    save_file(more, folder / "more.safetensors", metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(more, "more.safetensors")
    index.write_text(json.dumps(content))
    assert skimkv.load(folder)[0].config.num_hidden_layers == 2


def test_a_folder_without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(folder, "cannot load its tokenizer: ")


def test_check_source():
    assert check_source("builtin") == check_source(BUILTIN) == Source("folder", str(BUILTIN))
    for path in ("./no/such/folder", "/no/such/folder", "~/no-such-folder", "a/b/c", ""):
        refused_at_the_door(path, "no such folder")


@pytest.fixture
def hub(monkeypatch):
    """The hub's client, online and with an empty cache; a test sets what an answer to model_info is."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub = types.SimpleNamespace(cached=None, answer=None)

    def model_info(self, model, timeout):
        if isinstance(hub.answer, Exception):
            raise hub.answer
        return hub.answer() if callable(hub.answer) else hub.answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda model, file: hub.cached)
    return hub


def test_an_id_when_the_hub_is_out_of_reach(hub, monkeypatch):
    hub.answer = ConnectionError("Name or service not known")
    advice = "give the folder of a checkpoint or the name of a cached model.*HF_HUB_OFFLINE.*HF_ENDPOINT"
    refused_at_the_door("nobody/nothing", rf"cannot be reached \(Name or service not known\); {advice}")
    hub.cached = "config.json"
    with pytest.warns(UserWarning, match="nobody/nothing is loaded from the cache .* cannot be reached"):
        assert check_source("nobody/nothing") == Source("hub", "nobody/nothing", only_cached=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert check_source("nobody/nothing").only_cached, "as asked for: no warning"
    hub.cached = None
    refused_at_the_door("nobody/nothing", f"HF_HUB_OFFLINE forbids a download; {advice}")


def test_a_hub_that_never_answers(hub, monkeypatch):
    monkeypatch.setattr(loading, "HUB_TIMEOUT", 0.1)
    hub.answer = lambda: time.sleep(30)
    refused_at_the_door("nobody/nothing", "cannot be reached .no answer within 0.1 seconds")


def test_what_the_hub_answers(hub):
    def repository(*files):
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=file) for file in files])

    def error(kind, status):
        return kind("no", response=types.SimpleNamespace(headers={}, request=None, status_code=status))

    hub.answer = repository("config.json", "model.safetensors")
    assert check_source("some/model") == Source("hub", "some/model")
    hub.answer = repository("model.Q8_0.gguf")
    refused_at_the_door("some/model", "no config.json; a GGUF file must be downloaded first")
    hub.answer = repository("config.json", "pytorch_model.bin")
    refused_at_the_door("some/model", "no weights in safetensors")
    hub.answer = error(huggingface_hub.errors.RepositoryNotFoundError, 404)
    refused_at_the_door("some/model", "the hub has no such model")
    hub.answer = error(huggingface_hub.errors.GatedRepoError, 403)
    refused_at_the_door("some/model", "access is restricted")
    hub.answer = error(huggingface_hub.errors.HfHubHTTPError, 503)
    refused_at_the_door("some/model", "cannot be reached")


def test_check_source_imports_nothing_heavy(tmp_path):
    """And an address where nobody listens is reported within seconds."""
    code = (
        "import sys, time\nfrom skimkv.hf.load import check_source\nstart = time.perf_counter()\n"
        "try:\n    check_source('nobody/nothing')\nexcept ValueError as error:\n    print(error)\n"
        "print(time.perf_counter() - start < 10, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    message, facts = run.stdout.splitlines()
    assert message.startswith("nobody/nothing: ") and "http://127.0.0.1:9 cannot be reached" in message
    assert facts == "True False False"


ODD_VALUES = [
    None, True, "x", "", -1, 0, 1, 3, 1.5, -0.5, 1e308, 2**31, 2**63, 10**30, [], [1], ["x"], {}, {"x": 1}, [[]],
    {"rope_type": "x"}, {"rope_type": "yarn", "factor": "x"}, "float32", "sliding_attention", "\udcff", "a" * 5000,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_damaged_config_loads_or_is_refused_in_one_line(tmp_path, kind):
    """Whatever stands in config.json: a model, or one line with the path; never another exception, never no end."""
    family(kind).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole, draw, messages = json.loads(path.read_text()), random.Random(0), []
    mutations = [{"num_hidden_layers" if kind != "gpt2" else "n_layer": 2**31}]
    for _ in range(150):
        name = draw.choice([*whole, "quantization_config", "text_config", "num_labels"])
        mutations.append({name: draw.choice(ODD_VALUES)})
    for mutation in mutations:
        path.write_text(json.dumps({**whole, **mutation}))
        try:
            skimkv.load(tmp_path)
        except (ValueError, OSError) as error:
            messages.append(str(error))
        except BaseException as error:
            raise AssertionError(f"{mutation} raises {type(error).__name__}") from error
    assert 30 < len(messages) < 151
    assert all("\n" not in line and str(tmp_path) in line and len(line) < 1000 for line in messages)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "null",
        "[" * 100_000,
        '{"model_type": 7}',
        "{}",
        "\0",
        '"llama"',
        '{"model_type": "llama", ',
        '{"model_type": "lama"}',
    ],
)
def test_a_config_that_is_no_configuration(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config|model")


def test_sizes_far_beyond_the_weights_are_refused_before_they_are_allocated(folder):
    whole = json.loads((folder / "config.json").read_text())
    for change in ({"hidden_size": 2**30}, {"vocab_size": 2**40}, {"intermediate_size": 10**12}):
        (folder / "config.json").write_text(json.dumps({**whole, **change}))
        refused(folder, r"it describes a model of [\d,]+ numbers, the weights have [\d,]+ bytes")


def test_fewer_than_no_parts(folder):
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_hidden_layers", "num_experts"):
        (folder / "config.json").write_text(json.dumps({**config, name: -1}))
        refused(folder, f"config.json: {name} = -1 must be at least 0")


def test_a_damaged_tokenizer_is_refused_in_one_line(folder):
    path = folder / "tokenizer.json"
    content, draw, messages = json.loads(path.read_text()), random.Random(0), []
    for _ in range(30):
        name = draw.choice([*content])
        path.write_text(json.dumps({**content, name: draw.choice(ODD_VALUES)}))
        try:
            skimkv.load(folder)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 5
    assert all("\n" not in line and str(folder) in line and len(line) < 1000 for line in messages)


@torch.no_grad()
def test_device_and_device_map(folder, monkeypatch):
    for device in ("cpu", torch.device("cpu")):
        model, _ = skimkv.load(folder, device=device, dtype="half")
        assert (model.device.type, model.dtype) == ("cpu", torch.float16)
    pytest.importorskip("accelerate")
    for device_map in ("cpu", {"": "cpu"}):
        model, _ = skimkv.load(folder, device_map=device_map, fast=False)
        assert torch.equal(model(prompt()).logits, AutoModelForCausalLM.from_pretrained(folder)(prompt()).logits)
    asked = []
    monkeypatch.setattr(
        loading, "_from_pretrained", lambda *args: asked.append(args[-1]) or (types.SimpleNamespace(), None)
    )
    skimkv.load(folder, device_map="auto", fast=False)
    assert asked == ["auto"]


PLACES = [
    ({"device": "tpu"}, "device 'tpu' is unknown; write cpu, cuda .* or mps"),
    ({"device": 1}, "device '1' is unknown"),
    ({"device": "cuda:x"}, "device 'cuda:x' is unknown"),
    ({"device": "cpu", "device_map": "auto"}, "device='cpu' and device_map='auto': give one of them"),
    ({"device_map": "tpu"}, "device_map='tpu': 'tpu' is unknown; write auto, balanced"),
    ({"device_map": {"": "gpu"}}, "'gpu' is unknown"),
    ({"device_map": True}, "'True' is unknown"),
    ({"device_map": -1}, "'cuda:-1' is unknown"),
    ({"device_map": "auto", "weights": "int8"}, "weights=\"int8\": device_map='auto' is not possible"),
    (
        {"device": "cuda", "weights": "int8"},
        "weights=\"int8\": device 'cuda' is not possible; it runs on a CPU",
    ),
    ({"dtype": "fp15"}, "unknown dtype 'fp15'; known are float32"),
    ({"dtype": torch.int8}, "unknown dtype 'int8'"),
    ({"dtype": "nn"}, "unknown dtype 'nn'"),
    ({"weights": "int2"}, "unknown weights 'int2'; known: int8, int4"),
    ({"dtype": 16}, "unknown dtype '16'"),
]


@pytest.mark.parametrize(("arguments", "reason"), PLACES, ids=[str(arguments) for arguments, _ in PLACES])
def test_a_place_or_format_that_cannot_be(monkeypatch, arguments, reason):
    """Each is found before torch is needed: an import of it would raise ImportError."""
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())  # as if accelerate was there
    load = skimkv.load
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        refuses(lambda: load("builtin", **arguments), reason)


FORMATS = [
    ({"weights": "int4"}, "^weights='int4': {} has formats of its own; leave it out$"),
    ({"weights": "bfloat16"}, "^weights='bfloat16': {} has formats of its own"),
    ({"dtype": "fp64"}, "^dtype='float64' is not possible with {}; write float32, bfloat16 or float16$"),
    ({"dtype": "float64", "weights": "int8"}, "^weights='int8': {} has formats of its own"),
]


@pytest.mark.parametrize(("arguments", "reason"), FORMATS, ids=[str(arguments) for arguments, _ in FORMATS])
def test_number_formats_that_a_gguf_file_cannot_be_given(tmp_path, arguments, reason):
    path = tmp_path / "m.gguf"
    path.touch()
    refuses(lambda: skimkv.load(path, **arguments), reason.format(path))


def test_weights_that_are_quantised_cannot_be_computed_with_in_64_bits():
    reason = "^dtype='float64' is not possible with weights='int8'; write float32, bfloat16 or float16$"
    refuses(lambda: skimkv.load("builtin", dtype=torch.float64, weights="int8"), reason)


def test_a_device_that_is_not_here(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for arguments, reason in (
        ({"device": "cuda"}, "device cuda: PyTorch sees no CUDA device here"),
        ({"device": "mps"}, "device mps: PyTorch sees no Apple GPU here"),
        ({"device_map": 0}, "device cuda:0: PyTorch sees no CUDA device here"),
        ({"device_map": {"": "cuda:1"}}, "device cuda:1: PyTorch sees no CUDA device here"),
    ):
        with pytest.raises(ValueError, match=reason):
            skimkv.load("builtin", **arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device cuda:2: PyTorch sees only 2 CUDA devices here"):
        skimkv.load("builtin", device="cuda:2")


def test_device_map_needs_accelerate(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="device_map='auto' needs accelerate: pip install accelerate"):
        skimkv.load("builtin", device_map="auto")


def test_weights_of_the_models_own_format_are_deprecated() -> None:
    """It was how to ask for kernels of ours, which are the default; another format is a wish that stays."""
    with pytest.warns(DeprecationWarning, match="weights='float32': the numbers of builtin have this format already"):
        skimkv.load("builtin", weights="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        skimkv.load("builtin", weights="bfloat16")
