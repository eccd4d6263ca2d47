"""HTTP around every route: who may come in and how much, bodies, errors, metrics, event streams.

Knows no route, no text of prompts and answers, and no peer.
"""
