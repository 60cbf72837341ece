"""Megatron-native reinforcement learning for mixture-of-experts language models."""

import sys
from pathlib import Path

# In a clone that is not installed, the kernels lie beside this package. Last on the path: the folder must not hide
# anything, and a namespace package of its name there would lose to PyPI's `kernels` anyway.
_KERNELS = Path(__file__).parents[1] / "kernels"
if (_KERNELS / "megatron_rl_kernels").is_dir() and str(_KERNELS) not in sys.path:
    sys.path.append(str(_KERNELS))
