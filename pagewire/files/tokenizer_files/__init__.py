"""The files of a model's tokenizer, for every service that needs its vocabulary. It does not import transformers."""
