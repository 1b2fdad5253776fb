"""The connection to Hugging Face transformers. Importing this package imports nothing else.

    attach.py               attach a method to a model
    cache.py                the cache that generate() uses
    layer.py                one layer of that cache
    joint.py                several caches as one batch
    installation.py         what both change on a model, and how it is undone
    attention_interface.py  the attention and mask functions that the model calls
    adapters.py             models of PEFT: the transformers model inside, and which adapters are refused
    supported.py            which models, and which of their layers, a method can decode
    load.py                 load a model: builtin, a folder, a GGUF file, or an id of the Hugging Face hub
    weights.py              8-bit weights, quantised while a checkpoint is read
    gguf.py                 the GGUF file format
    gguf_config.py          the configuration that its metadata describe
    gguf_names.py           which parameter each of its tensors is
    gguf_tokenizer.py       its tokenizer
    gguf_model.py           its model, with the tensors as the file holds them
    linear_forward.py       the linear layers of a model, multiplied by our kernels where they lie
    norms.py                the normalisations of a model as one operation of ours
    decode_step.py          a decode step of all layers of a model as one operation
    saved_cache.py          caches in files
    compile.py              decoding as one compiled graph
    cuda_graph.py           that graph as a CUDA graph, which a GPU replays

How a query tensor runs from the model to the kernel: the model's attention layer calls `Cache.update` (cache.py),
which marks the key tensor with its layer, and then `attention` (attention_interface.py), which finds the layer by that
mark and calls `Layer.attend`; a decoded token goes on to `Method.decode` (methods/) and from there to the store and
the kernels of the backend (ops/).
"""
