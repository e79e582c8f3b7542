"""Softplus, log(1 + e^x), for which Triton has no function."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Returns log(1 + e^x), fp32 like x."""
    e = tl.exp(tl.minimum(x, 20.0))
    # Where 1 + e rounds e away, the first terms of the series.
    return tl.where(x > 20.0, x, tl.where(x < -8.0, e * (1 - 0.5 * e), tl.log(1 + e)))
