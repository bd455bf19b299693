#!/bin/sh
# An environment with SAELens and this package, for check_saelens.py and tests/export/test_torch.py.
#   sh benchmarks/saelens_env.sh FOLDER
set -eu
folder=${1:?say where: sh benchmarks/saelens_env.sh FOLDER}
here=$(cd "$(dirname "$0")/.." && pwd)
${PYTHON:-python3} -m venv "$folder"
# torch first: what follows would otherwise bring a newer one, with gigabytes of libraries for GPUs
"$folder/bin/python" -m pip install --quiet 'torch==2.13.0'
"$folder/bin/python" -m pip install --quiet 'sae-lens>=6.54,<7' -e "$here[test]"
"$folder/bin/python" -c 'import sae_lens, torch; print("sae-lens", sae_lens.__version__, "torch", torch.__version__)'
