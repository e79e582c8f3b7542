"""TGI's API, for the clients of Hugging Face's text-generation-inference."""
