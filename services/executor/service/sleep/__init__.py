"""The sleep of a model: its memory is given back, while the process, its imports and its compiled kernels stay."""
