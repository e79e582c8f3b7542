"""The files of models: where they are, GGUF, and the tokenizers that they hold."""
