"""The specification: every op in plain, readable torch, for any device.

`pagewire.kernels.ops` documents the arguments. All arithmetic is in fp32 and rounded once to the dtype of the
result, except where a comment says otherwise.
"""

# What a group defines is exported without a list that could miss it.
# ruff: noqa: F403

from __future__ import annotations

from pagewire.kernels.reference.adapters import *
from pagewire.kernels.reference.attention import *
from pagewire.kernels.reference.collectives import *
from pagewire.kernels.reference.drafts import *
from pagewire.kernels.reference.elementwise import *
from pagewire.kernels.reference.encoder import *
from pagewire.kernels.reference.experts import *
from pagewire.kernels.reference.inputs import *
from pagewire.kernels.reference.latent import *
from pagewire.kernels.reference.products import *
from pagewire.kernels.reference.sampling import *
from pagewire.kernels.reference.state_space import *
