"""What `octile.convert`, `octile convert` and the loaders of transformers, vLLM and SGLang do with each architecture.

    models.py           small random models in whole blocks: converted, trained, saved, loaded by transformers
    loading.py          what a loader leaves: parameters that it did not set, tensors that it did not read
    load_in_vllm.py     vLLM's own model classes and loaders, without a GPU
    load_in_sglang.py   SGLang's
    record.json         what was found, and with which versions

`python -m tools.write_architectures` writes the table of docs/supported_models.md from the record.
"""
