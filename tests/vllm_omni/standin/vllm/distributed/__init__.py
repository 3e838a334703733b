"""vLLM keeps the tensor parallel group."""
