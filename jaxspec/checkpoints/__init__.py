"""Weights and configs on disk: Hugging Face safetensors folders in and out, GGUF in, hub names to folders.

    hub.resolve(source)        a name, folder or GGUF file -> local path
    target.load_target(...)    -> Target (model, parameters on the device)
    drafter.load_drafter(...)  -> Draft; drafter.save_drafter writes the public formats
    store                      the folders themselves: headers, tensors, atomic writing, the two-way coverage check

Nothing here imports jax at package import, and nothing reads or writes pickle.
"""
