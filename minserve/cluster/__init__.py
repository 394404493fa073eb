"""More than one process: who gets a request, how many serve, and how prompts and answers part."""
