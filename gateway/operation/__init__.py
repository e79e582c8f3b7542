"""What operators and load balancers of vLLM and SGLang ask for: requests ended, load, what is served."""
