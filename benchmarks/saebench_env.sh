#!/bin/sh
# An environment with SAEBench and this package, for run_saebench.py.
#   sh benchmarks/saebench_env.sh FOLDER
# SAEBench wants numpy < 2 and datasets < 4, this package declares numpy >= 2: hence --no-deps for this package,
# which runs its encoder with either. torchvision is of no use to either, and one that does not match torch breaks
# the import of transformers. Run its programs with JAXTYPING_DISABLE=1.
set -eu
folder=${1:?say where: sh benchmarks/saebench_env.sh FOLDER}
here=$(cd "$(dirname "$0")/.." && pwd)
${PYTHON:-python3} -m venv "$folder"
limits="$folder/limits.txt"
printf 'torch==2.13.0\nnumpy<2\ndatasets<4\n' > "$limits"
pip="$folder/bin/python -m pip install --quiet"
$pip 'torch==2.13.0'
$pip -c "$limits" 'sae-bench>=0.6,<0.7'
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision
$pip -c "$limits" numba dask distributed zarr xarray fsspec threadpoolctl click rich safetensors pytest hypothesis
$pip --no-deps -e "$here"
"$folder/bin/python" -c 'import numpy, torch; print("numpy", numpy.__version__, "torch", torch.__version__)'
