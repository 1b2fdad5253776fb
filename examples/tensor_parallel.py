"""Generate with a model that is split over several processes, each of which caches its own key-value heads.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py MODEL "The capital of France is" "H2O(k=512)"

MODEL is a folder or an id of the Hugging Face hub. The number of processes must divide the number of its key-value
heads. More methods may follow. Each process prints, for each method, what its part of the cache holds, and the first
one also prints the text.
"""

import os
import sys

import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import skimkv


def main(name: str, text: str, *methods: str) -> None:
    """Print the text that each method generates, and the bytes of each process."""
    heads, processes = AutoConfig.from_pretrained(name).num_key_value_heads, int(os.environ["WORLD_SIZE"])
    if heads % processes:
        sys.exit(f"{processes} processes cannot share {heads} key-value heads: take a number that divides them")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_plan="auto"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    for method in methods:
        cache = skimkv.Cache(model, method)
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
        own = cache.stores[0].shape.H
        lines = [f"{method}: process {dist.get_rank()} holds {own} of {heads} key-value heads, {cache.nbytes} bytes"]
        if dist.get_rank() == 0:
            lines.append(f"{method}: {tokenizer.decode(out[0])}")
        # One write of whole lines: all processes print to the same place.
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 4 or "WORLD_SIZE" not in os.environ:
        sys.exit(__doc__)
    main(*sys.argv[1:])
    # The threads of a process group free the tensors of a finished operation when they come to it, and need Python for
    # that. One that comes to it while Python shuts down aborts the process, so the process ends without that.
    sys.stdout.flush()
    os._exit(0)
