"""The files of a model's tokenizer, for every service that needs its vocabulary. Imports no transformers."""
