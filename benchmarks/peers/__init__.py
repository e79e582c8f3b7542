"""One table beside OpenVINO GenAI, llama.cpp and vLLM: `python -m benchmarks.peers`."""
