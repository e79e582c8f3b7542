"""What the files of a model's tokenizer hold, for every service that needs its vocabulary. Imports no transformers."""
