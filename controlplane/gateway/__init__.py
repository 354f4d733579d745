"""OpenAI and SGLang HTTP in front of the engines."""
