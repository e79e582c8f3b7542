"""The model to quantize, a layer at a time, and the text that it reads."""
