"""Every test of the GPU code, in a process of its own with numba's CUDA simulator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_gpu_code_passes_its_tests_in_the_simulator():
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "tests/gpu/on_device", "-p", "no:cacheprovider", "-rs"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout, done.stdout[-2000:]
