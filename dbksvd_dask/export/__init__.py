"""Dictionaries for other tools, and dictionaries of other tools.

| module | does |
|---|---|
| `saelens` | writes the folder that `SAE.load_from_disk` of SAELens opens |
| `huggingface` | writes a folder ready to upload, with a model card |
| `foreign` | reads SAELens folders, safetensors and .npy files as a `Dictionary` |
| `saelens_plugin` | a SAELens class with this package's pursuit and all hooks; needs torch and sae-lens |
| `saebench` | an object for SAEBench; needs torch and sae-bench |
| `torch_pursuit` | the pursuit on torch tensors, for the two above; needs torch |

Writing and reading need neither torch nor SAELens.

May know dictionaries, codes, stores and evaluate; no Dask graphs, no fits.
"""
