"""What `fusion.inference.backends` touches of vLLM, against wheels that are read without being downloaded whole."""
