"""The operations of Pagewire's models, each defined once in this folder (see `definition.op`).

A definition states arguments, shapes and meaning. The exact meaning is the function of the same name in
`pagewire.kernels.reference`, in plain torch; `kernels/triton` has it for CUDA, `kernels/cpu` for CPUs: C++ if a
compiler is available, plain torch otherwise. Implementations load on first use: a CUDA process never compiles C++, and
a CPU process never imports Triton.

Callers import this package and call `ops.<op>`; its arguments are flat because torch's dispatcher has no structures.
"""

# The folder above this one has no __init__.py, on purpose. In a plain checkout with its root on sys.path, it is also
# found as `kernels`, the name of a package of Hugging Face that transformers imports if it is installed. A folder
# without an __init__.py gives way to a package wherever on the path that is; one with it would hide the package.

# What a group defines is exported without a list that could miss it.
# ruff: noqa: F403

from __future__ import annotations

from pagewire.kernels.backends import cpu_backend as cpu_backend
from pagewire.kernels.ops.adapters import *
from pagewire.kernels.ops.attention import *
from pagewire.kernels.ops.collectives import *
from pagewire.kernels.ops.definition import DEFINITIONS as DEFINITIONS
from pagewire.kernels.ops.definition import Definition as Definition
from pagewire.kernels.ops.drafts import *
from pagewire.kernels.ops.elementwise import *
from pagewire.kernels.ops.encoder import *
from pagewire.kernels.ops.experts import *
from pagewire.kernels.ops.inputs import *
from pagewire.kernels.ops.latent import *
from pagewire.kernels.ops.plans import *
from pagewire.kernels.ops.products import *
from pagewire.kernels.ops.sampling import *
from pagewire.kernels.ops.state_space import *
