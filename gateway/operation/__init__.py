"""Routes for operators and load balancers: probes, metrics, status, weights, and those of vLLM and SGLang."""
