"""Text and token ids, both ways: templates, prompts, sampling and grammars in; text, reasoning and calls out.

Knows nothing of HTTP or peers.
"""
