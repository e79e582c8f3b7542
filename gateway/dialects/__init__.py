"""The APIs of other servers, each in a room that translates to our types: SGLang's, Ollama's and TGI's."""
